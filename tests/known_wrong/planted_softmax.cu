// Small kernels of softmax for float32: correct as NONE, with one mistake for each other value of Fault.
// The input is rows x cols with one stride between rows and one between columns. The result is contiguous.
#include <cuda_fp16.h>

enum Fault {
    NONE,
    NO_MAXIMUM,
    MAXIMUM_FROM_ZERO,
    MAXIMUM_OF_MAGNITUDES,
    MAXIMUM_OF_OWN_COLUMNS,
    FIRST_WARP_ONLY,
    BARRIER_MISSING,
    BUFFER_USED_AGAIN,
    UNWRITTEN_SLOTS_READ,
    SHUFFLE_OF_HALF_A_WARP,
    IDLE_THREADS_RETURN,
    BARRIER_IN_A_BRANCH,
    BARRIER_IN_A_LOOP,
    ROW_OF_FIXED_LENGTH,
    ROWS_PAST_THE_GRID,
    CONTIGUOUS_ASSUMED,
    ZERO_WHERE_NOTHING_IS_LEFT,
    SUM_IN_HALF,
    LAST_COLUMNS_DROPPED,
    RECIPROCAL_OF_HALF,
    GRAD_OUTPUT_CONTIGUOUS_ASSUMED,
    SUM_OF_FIRST_WARP,
    OFFSETS_IN_32_BITS
};

struct Largest {
    // fmaxf drops a NaN, but the sum of the exponentials still propagates it.
    __device__ static float of(float a, float b) { return fmaxf(a, b); }
};
struct Sum {
    __device__ static float of(float a, float b) { return a + b; }
};

// Reduce over the threads of a block; every thread gets the result.
template <class F> __device__ float reduce(float value, float* of_warp, long long fault) {
    int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (fault == SHUFFLE_OF_HALF_A_WARP) {
        for (int by = 8; by; by /= 2) value = F::of(value, __shfl_xor_sync(0x0000ffffu, value, by));
    } else {
        for (int by = 16; by; by /= 2) value = F::of(value, __shfl_xor_sync(0xffffffffu, value, by));
    }
    if (fault == FIRST_WARP_ONLY || fault == SUM_OF_FIRST_WARP) warps = 1;
    if (fault == UNWRITTEN_SLOTS_READ) warps = 32;
    if (fault != BUFFER_USED_AGAIN) __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[warp] = value;
    if (fault == BARRIER_IN_A_BRANCH) {
        if (threadIdx.x < 32) __syncthreads();
    } else if (fault != BARRIER_MISSING) {
        __syncthreads();
    }
    value = of_warp[0];
    for (int w = 1; w < warps; w++) value = F::of(value, of_warp[w]);
    return value;
}

__global__ void softmax_forward_kernel(const float* x, float* y, long long rows, long long cols, long long row_stride,
                                       long long col_stride, long long fault) {
    // One block owns rows blockIdx.x, blockIdx.x + gridDim.x, ..., one thread columns threadIdx.x, + blockDim.x, ...
    __shared__ float of_warp[32];
    __shared__ float kept[512];
    if (fault == IDLE_THREADS_RETURN && threadIdx.x >= cols) return;
    if (fault == CONTIGUOUS_ASSUMED) row_stride = cols, col_stride = 1;
    if (fault == LAST_COLUMNS_DROPPED && cols > blockDim.x) cols = cols / blockDim.x * blockDim.x;
    long long step = fault == ROWS_PAST_THE_GRID ? rows : gridDim.x;
    for (long long row = blockIdx.x; row < rows; row += step) {
        const float* from = x + (fault == OFFSETS_IN_32_BITS ? (int)row * (int)row_stride : row * row_stride);
        float most = fault == MAXIMUM_FROM_ZERO ? 0.0f : -INFINITY;
        for (long long col = threadIdx.x; col < cols; col += blockDim.x) {
            float value = from[col * col_stride];
            if (fault == ROW_OF_FIXED_LENGTH) kept[col] = value;
            if (fault == BARRIER_IN_A_LOOP) __syncthreads();
            most = fmaxf(most, fault == MAXIMUM_OF_MAGNITUDES ? fabsf(value) : value);
        }
        if (fault != MAXIMUM_OF_OWN_COLUMNS) most = reduce<Largest>(most, of_warp, fault);
        if (fault == NO_MAXIMUM) most = 0.0f;
        float sum = 0.0f;
        for (long long col = threadIdx.x; col < cols; col += blockDim.x) {
            float term = expf(from[col * col_stride] - most);
            sum = fault == SUM_IN_HALF ? __half2float(__float2half(sum + term)) : sum + term;
        }
        sum = reduce<Sum>(sum, of_warp, fault);
        if (fault == RECIPROCAL_OF_HALF) sum = 1.0f / __half2float(__float2half(1.0f / sum));
        for (long long col = threadIdx.x; col < cols; col += blockDim.x) {
            float result = expf(from[col * col_stride] - most) / sum;
            if (fault == ZERO_WHERE_NOTHING_IS_LEFT && most == -INFINITY) result = 0.0f;
            y[row * cols + col] = result;
        }
    }
}

__global__ void softmax_backward_kernel(const float* grad_output, const float* y, float* grad_x, long long rows,
                                        long long cols, long long row_stride, long long col_stride, long long fault) {
    // One block owns rows blockIdx.x, blockIdx.x + gridDim.x, ... y and grad_x are contiguous.
    __shared__ float of_warp[32];
    if (fault == GRAD_OUTPUT_CONTIGUOUS_ASSUMED) row_stride = cols, col_stride = 1;
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const float *grad = grad_output + row * row_stride, *of = y + row * cols;
        float sum = 0.0f;
        for (long long col = threadIdx.x; col < cols; col += blockDim.x) sum += grad[col * col_stride] * of[col];
        sum = reduce<Sum>(sum, of_warp, fault);
        for (long long col = threadIdx.x; col < cols; col += blockDim.x)
            grad_x[row * cols + col] = of[col] * (grad[col * col_stride] - sum);
    }
}
