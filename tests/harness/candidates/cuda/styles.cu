// What kernels of samples and of published code use, a kernel each.
#include <assert.h>
#include <cub/cub.cuh>
#include <cuda_runtime.h>
#include <device_launch_parameters.h>

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <limits>

constexpr int THREADS = 64;
typedef float real;

__inline__ __device__ float warp_sum(float v) {
#pragma unroll
    for (int offset = warpSize / 2; offset > 0; offset /= 2) v += __shfl_down_sync(0xffffffff, v, offset);
    return v;
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_by_warps(const real* __restrict__ x, real* __restrict__ out, const unsigned int n) {
    static __shared__ float shared[32];
    int lane = threadIdx.x % warpSize, wid = threadIdx.x / warpSize;
    float v = 0.0f;
    for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) v += __ldg(x + i);
    v = warp_sum(v);
    if (lane == 0) shared[wid] = v;
    __syncthreads();
    v = threadIdx.x < blockDim.x / warpSize ? shared[lane] : 0.0f;
    if (wid == 0) v = warp_sum(v);
    if (threadIdx.x == 0) atomicAdd(out, v);
}

__global__ void sum_by_cub(const float* x, float* out, size_t n) {
    typedef cub::BlockReduce<float, THREADS> BlockReduce;
    __shared__ typename BlockReduce::TempStorage storage;
    float v = 0.0f;
    for (size_t i = threadIdx.x; i < n; i += THREADS) v += x[i];
    float total = BlockReduce(storage).Sum(v);
    if (threadIdx.x == 0) *out = total;
}

__global__ void sum_by_cub_again(const float* x, float* out, size_t n) {
    typedef cub::BlockReduce<float, THREADS> BlockReduce;
    __shared__ typename BlockReduce::TempStorage storage;
    float first = BlockReduce(storage).Sum(x[threadIdx.x]);  // FAULT
    float second = BlockReduce(storage).Sum(x[threadIdx.x]);  // FAULT
    if (threadIdx.x == 0) *out = first + second;
}

__global__ void extremes(const float* x, float* out, int n) {
    float largest = -FLT_MAX, least = std::numeric_limits<float>::infinity();
    int count = INT_MAX;
    for (int i = 0; i < n; i++) {
        largest = max(largest, x[i]);
        least = fminf(least, x[i]);
        count = min(count, i);
    }
    assert(count == 0);
    if (threadIdx.x == 0) {
        out[0] = largest;
        out[1] = least == INFINITY ? -INFINITY : least;
        out[2] = __expf(x[0]) * rsqrtf(4.0f) * __fdividef(1.0f, 2.0f);
        out[3] = static_cast<float>(M_PI) * static_cast<int32_t>(2);
        if (n < 0) printf("never\n");
    }
}
