// A small tiled matmul for float32 with an activation: correct as NONE, with one mistake for each other Fault.
#include <cuda_fp16.h>

enum Fault {
    NONE,
    BARRIER_BEFORE_THE_TILE_IS_READ_MISSING,
    BARRIER_BEFORE_THE_NEXT_TILE_MISSING,
    EDGE_THREADS_RETURN,
    TAIL_OF_TERMS_READ,
    TAIL_OF_TERMS_DROPPED,
    TAIL_OF_TILE_UNWRITTEN,
    STORE_UNMASKED,
    STRIDES_SWAPPED,
    CONTIGUOUS_ASSUMED,
    ACCUMULATOR_KEPT,
    ACTIVATED_IN_EACH_TILE,
    SLOPE_TYPED_IN,
    NAN_IS_0_TO_RELU,
    SUM_IN_HALF,
    SQUARE_GRID,
    STORED_TRANSPOSED,
    OFFSETS_IN_32_BITS
};

enum Activation { PLAIN, RELU, LEAKY_RELU };

__device__ float activated(float x, long long activation, float slope, long long fault) {
    if (fault == SLOPE_TYPED_IN) slope = 0.01f;
    if (activation == RELU) return fault == NAN_IS_0_TO_RELU ? fmaxf(x, 0.0f) : x <= 0.0f ? 0.0f : x;
    if (activation == LEAKY_RELU) return x > 0.0f ? x : x * slope;
    return x;
}

constexpr int TILE = 8;

__global__ void matmul_kernel(const float* a, const float* b, float* c, long long m, long long k, long long n,
                              long long a_row, long long a_col, long long b_row, long long b_col, long long tiles,
                              long long activation, double slope, long long fault) {
    // One block of TILE x TILE threads owns tiles blockIdx.x, blockIdx.x + gridDim.x, ... in row-major order.
    __shared__ float of_a[TILE][TILE];
    __shared__ float of_b[TILE][TILE];
    if (fault == STRIDES_SWAPPED) {
        long long row = b_row;
        b_row = b_col, b_col = row;
    }
    if (fault == CONTIGUOUS_ASSUMED) a_row = k, a_col = 1, b_row = n, b_col = 1;
    int y = threadIdx.y, x = threadIdx.x;
    long long across = ((fault == SQUARE_GRID ? m : n) + TILE - 1) / TILE;
    float sum = 0.0f;
    for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        long long row = tile / across * TILE + y, col = tile % across * TILE + x;
        if (fault == EDGE_THREADS_RETURN && (row >= m || col >= n)) return;
        if (fault != ACCUMULATOR_KEPT) sum = 0.0f;
        long long terms = fault == TAIL_OF_TERMS_DROPPED && k > TILE ? k / TILE * TILE : k;
        for (long long start = 0; start < terms; start += TILE) {
            bool all = fault == TAIL_OF_TERMS_READ;
            bool of_row = row < m && (all || start + x < k), of_col = col < n && (all || start + y < k);
            if (of_row || fault != TAIL_OF_TILE_UNWRITTEN)
                of_a[y][x] = of_row ? a[(fault == OFFSETS_IN_32_BITS ? (int)row * (int)a_row : row * a_row) + (start + x) * a_col] : 0.0f;
            if (of_col || fault != TAIL_OF_TILE_UNWRITTEN)
                of_b[y][x] = of_col ? b[(start + y) * b_row + col * b_col] : 0.0f;
            if (fault != BARRIER_BEFORE_THE_TILE_IS_READ_MISSING) __syncthreads();
            for (int i = 0; i < TILE; i++) {
                sum += of_a[y][i] * of_b[i][x];
                if (fault == SUM_IN_HALF) sum = __half2float(__float2half(sum));
            }
            if (fault != BARRIER_BEFORE_THE_NEXT_TILE_MISSING) __syncthreads();
            if (fault == ACTIVATED_IN_EACH_TILE) sum = activated(sum, activation, (float)slope, fault);
        }
        float result = activated(sum, activation, (float)slope, fault);
        if ((row < m && col < n) || fault == STORE_UNMASKED)
            c[fault == STORED_TRANSPOSED ? col * m + row : row * n + col] = result;
    }
}

// Each block along y adds its share of the terms to the result, which must be 0 before the launch.
__global__ void split_kernel(const float* a, const float* b, float* c, long long m, long long k, long long n,
                             long long a_row, long long a_col, long long b_row, long long b_col, long long fault) {
    // One thread owns one element and every gridDim.y-th term of it.
    long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x, row = at / n, col = at % n;
    if (at >= m * n) return;
    float sum = 0.0f;
    for (long long i = blockIdx.y; i < k; i += gridDim.y) sum += a[row * a_row + i * a_col] * b[i * b_row + col * b_col];
    atomicAdd(c + at, sum);
}
