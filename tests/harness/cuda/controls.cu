// Correct kernels, for the CPU and for a GPU: each has something that a checker could wrongly object to.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>
#include <mma.h>

#include "reductions.cuh"

template <class T> struct Compute { using type = float; };
template <> struct Compute<double> { using type = double; };

template <class T> __global__ void __launch_bounds__(256) softmax(const T* __restrict__ x, T* __restrict__ y, long long cols) {
    using C = typename Compute<T>::type;
    const T* row = x + blockIdx.x * cols;
    T* out = y + blockIdx.x * cols;
    C largest = -CUDART_INF_F, sum = 0;
    for (long long i = threadIdx.x; i < cols; i += blockDim.x) largest = max(largest, static_cast<C>(row[i]));
    largest = block_reduce(largest, C(-CUDART_INF_F), Largest());
    for (long long i = threadIdx.x; i < cols; i += blockDim.x) sum += exp(static_cast<C>(row[i]) - largest);
    sum = block_reduce(sum, C(0), Sum());
    for (long long i = threadIdx.x; i < cols; i += blockDim.x) out[i] = static_cast<T>(exp(static_cast<C>(row[i]) - largest) / sum);
}

template <class T, int Tile>
__global__ void matmul(const T* a, const T* b, T* c, long long m, long long n, long long k) {
    __shared__ T left[Tile][Tile], right[Tile][Tile + 1];
    long long row = blockIdx.y * Tile + threadIdx.y, col = blockIdx.x * Tile + threadIdx.x;
    T sum = 0;
    for (long long start = 0; start < k; start += Tile) {
        left[threadIdx.y][threadIdx.x] = row < m && start + threadIdx.x < k ? a[row * k + start + threadIdx.x] : T(0);
        right[threadIdx.y][threadIdx.x] = col < n && start + threadIdx.y < k ? b[(start + threadIdx.y) * n + col] : T(0);
        __syncthreads();
        for (int i = 0; i < Tile; i++) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && col < n) c[row * n + col] = sum;
}

// The last block to finish adds up all blocks' sums, and leaves the counter as it found it.
template <bool EveryThreadFences>
__global__ void two_stage_sum(const float* x, float* partial, unsigned* counter, float* out, long long n) {
    __shared__ bool last;
    float v = 0.0f;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x) v += x[i];
    v = block_reduce(v, 0.0f, Sum());
    if (threadIdx.x == 0) partial[blockIdx.x] = v;
    if (EveryThreadFences || threadIdx.x == 0) __threadfence();
    if (threadIdx.x == 0) last = atomicAdd(counter, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    v = 0.0f;
    for (unsigned b = threadIdx.x; b < gridDim.x; b += blockDim.x) v += partial[b];
    v = block_reduce(v, 0.0f, Sum());
    if (threadIdx.x == 0) {
        *out = v;
        *counter = 0;
    }
}

// The last warp of the block to finish adds up all warps' sums.
__global__ void last_warp_sums(const float* x, float* out) {
    __shared__ float parts[32];
    __shared__ unsigned finished;
    if (threadIdx.x == 0) finished = 0;
    __syncthreads();
    float v = x[threadIdx.x];
    for (int d = 16; d; d /= 2) v += __shfl_down_sync(~0u, v, d);
    bool last = false;
    if (threadIdx.x % 32 == 0) {
        parts[threadIdx.x / 32] = v;
        __threadfence_block();
        last = atomicAdd(&finished, 1u) == blockDim.x / 32 - 1;
    }
    if (!last) return;
    float sum = 0.0f;
    for (unsigned w = 0; w < blockDim.x / 32; w++) sum += parts[w];
    *out = sum;
}

// Blocks hand a value on, each to the next, through two flags: order goes along with what a block has seen.
__global__ void passes_on(unsigned* flags, float* values) {
    if (atomicAdd(&flags[0], 0u) == 0) {
        values[0] = 1.0f;
        __threadfence();
        atomicExch(&flags[0], 1u);
    } else if (atomicAdd(&flags[1], 0u) == 0) {
        values[1] = values[0] + 1.0f;
        __threadfence();
        atomicExch(&flags[1], 1u);
    } else {
        values[2] = values[0] + values[1];
    }
}

template <class T> __global__ void atomic_sum(const T* x, T* out, long long n) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x)
        atomicAdd(out, x[i]);
}

__global__ void atomics(const int* x, int* out, unsigned* wraps, unsigned long long* wide, float* largest, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    atomicAdd(&out[0], x[i]);
    atomicSub(&out[1], x[i]);
    atomicMin(&out[2], x[i]);
    atomicMax(&out[3], x[i]);
    atomicAnd(&out[4], x[i]);
    atomicOr(&out[5], x[i]);
    atomicXor(&out[6], x[i]);
    atomicExch(&out[7], 7);
    atomicInc(&wraps[0], 9);
    atomicDec(&wraps[1], 9);
    atomicAdd(wide, 1ull << 33);
    int* bits = reinterpret_cast<int*>(largest);
    int seen = 0, assumed;
    do {
        assumed = seen;
        seen = atomicCAS(bits, assumed, __float_as_int(fmaxf(__int_as_float(assumed), float(x[i]))));
    } while (seen != assumed);
}

// Row r of `out` is the r-th intrinsic's result, by thread.
__global__ void warp_intrinsics(const int* x, int* out) {
    int i = threadIdx.x, n = blockDim.x, lane = i % 32, v = x[i], row = 0;
    auto put = [&](int result) { out[row++ * n + i] = result; };
    put(__shfl_sync(~0u, v, 5));
    put(__shfl_sync(~0u, v, lane + 1, 8));
    put(__shfl_up_sync(~0u, v, 3));
    put(__shfl_down_sync(~0u, v, 3, 16));
    put(__shfl_xor_sync(~0u, v, 9));
    put(int(__ballot_sync(~0u, v % 3 == 0)));
    put(__any_sync(~0u, v == 40));
    put(__all_sync(~0u, v < 40));
    put(__reduce_add_sync(~0u, v));
    put(__reduce_min_sync(~0u, v));
    put(__reduce_max_sync(~0u, v));
    put(int(__reduce_or_sync(~0u, unsigned(v))));
    put(int(__match_any_sync(~0u, v % 4)));
    put(__syncthreads_count(v % 3 == 0));
    put(__syncthreads_and(v >= 0));
    put(__syncthreads_or(v == 1000));
    int active = 0;
    if (lane < 16) {
        unsigned mask = 0x0000ffff;
        active = __shfl_xor_sync(mask, v, 1) + __popc(__activemask() & mask);
    }
    put(active);
    put(__popc(v));
    put(__clz(v));
    put(__ffs(v));
    put(int(__brev(unsigned(v)) >> 1));
    put(__float2int_rn(v * 0.5f));
    put(int(warpSize));
}

__global__ void syncs_ever_fewer_lanes(const float* x, float* out) {
    __shared__ float s[64];
    int lane = threadIdx.x % 32, first = threadIdx.x - lane;
    s[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    for (int half = 16; half; half /= 2) {
        if (lane < half) {
            s[threadIdx.x] += s[threadIdx.x + half];
            __syncwarp((1u << half) - 1);
        }
    }
    if (lane == 0) out[threadIdx.x / 32] = s[first];
}

__global__ void reverses_in_dynamic_shared(const double* x, double* y, long long n) {
    extern __shared__ __align__(16) unsigned char raw[];
    double* row = reinterpret_cast<double*>(raw);
    for (long long i = threadIdx.x; i < n; i += blockDim.x) row[i] = x[i];
    __syncthreads();
    for (long long i = threadIdx.x; i < n; i += blockDim.x) y[i] = row[n - 1 - i];
}

// A row of stride `stride`: a view with gaps is fine as long as the gaps are left alone.
__global__ void doubles_rows(const float* x, float* y, long long cols, long long stride_x, long long stride_y) {
    for (long long i = threadIdx.x; i < cols; i += blockDim.x) y[blockIdx.x * stride_y + i] = 2.0f * x[blockIdx.x * stride_x + i];
}

__global__ void adds_vectors(const float4* x, const float2* shift, float4* y, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float4 v = x[i];
    float2 s = shift ? __ldg(shift) : make_float2(0.0f, 0.0f);
    __stcs(&y[i], make_float4(v.x + s.x, v.y + s.y, v.z + s.x, v.w + s.y));
}

__constant__ float table[4] = {1.0f, 10.0f, 100.0f, 1000.0f};

// CUDA's min and max drop a NaN; the arithmetic below is the ordinary kind.
__global__ void mathematics(const float* x, float* out, bool negate, double factor, long long n) {
    long long i = threadIdx.x;
    if (i >= n) return;
    float v = x[i], copy;
    memcpy(&copy, x + i, sizeof copy);
    out[0 * n + i] = fmaxf(v, 0.5f);
    out[1 * n + i] = fminf(0.5f, v);
    out[2 * n + i] = max(v, 0.5f) + min(v, -0.5f);
    out[3 * n + i] = isnan(v) || isinf(v) ? -1.0f : rsqrtf(fabsf(v) + 1.0f);
    out[4 * n + i] = __expf(-fabsf(copy));
    out[5 * n + i] = exp2f(-fabsf(v)) + __fdividef(1.0f, 4.0f) + __frcp_rn(2.0f) + __fmaf_rn(2.0f, 3.0f, 4.0f);
    out[6 * n + i] = (negate ? -table[i % 4] : table[i % 4]) * float(factor);
    out[7 * n + i] = __int_as_float(__float_as_int(v) & 0x7fffffff);
    out[8 * n + i] = __saturatef(v);
}

template <class T, class T2> __global__ void pairs(const T2* x, T2* y, const T* singles, T* out, long long n) {
    long long i = threadIdx.x;
    if (i >= n) return;
    T2 v = x[i];
    y[i] = __hadd2(__hfma2(v, v, y[i]), __hmul2(v, v));
    float sum = float(v.x) + float(v.y);
    T s = singles[i];
    out[i] = T(sum) + __hmax(s, T(0.0f)) * T(2.0f) - hexp(T(0.0f)) + __shfl_xor_sync(~0u, s, 1);
}

template <class T> __global__ void tensor_cores(const T* a, const T* b, float* c, long long m, long long n, long long k) {
    using namespace nvcuda;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> left;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major> right;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums;
    __shared__ __align__(32) T tile[256];
    wmma::fill_fragment(sums, 0.0f);
    long long row = blockIdx.y * 16, col = blockIdx.x * 16;
    for (long long i = 0; i < k; i += 16) {
        for (int j = threadIdx.x; j < 256; j += 32) tile[j] = a[(row + j / 16) * k + i + j % 16];
        wmma::load_matrix_sync(left, tile, 16);
        wmma::load_matrix_sync(right, b + col * k + i, k);
        wmma::mma_sync(sums, left, right, sums);
        __syncwarp();
    }
    for (int i = 0; i < sums.num_elements; i++) sums.x[i] = sums.x[i] > 0.0f ? sums.x[i] : 0.5f * sums.x[i];
    wmma::store_matrix_sync(c + row * n + col, sums, n, wmma::mem_row_major);
}

__global__ void takes_a_struct(float* x, int2 sizes) { x[0] = sizes.x; }

template <class T> __device__ double as_double(T number) { return double(number); }
__device__ double as_double(__half number) { return __half2float(number); }
__device__ double as_double(__nv_bfloat16 number) { return __bfloat162float(number); }
template <class T> __global__ void takes(double* out, T number) { *out = as_double(number); }

// Every thread keeps so many values that no architecture has registers for them.
__global__ void __launch_bounds__(1024) spills(const float* x, float* y, long long n) {
    float kept[200];
#pragma unroll
    for (int i = 0; i < 200; i++) kept[i] = x[threadIdx.x + i * n];
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 200; i++) sum += kept[i] * kept[199 - i] * kept[(i * 7) % 200];
#pragma unroll
    for (int i = 0; i < 200; i++) y[threadIdx.x + i * n] = kept[i] * sum;
}
