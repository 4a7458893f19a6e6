#pragma once

struct Sum {
    template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct Largest {
    template <class T> __device__ T operator()(T a, T b) const { return max(a, b); }
};

// The same value in every thread of the block, whose size is a multiple of 32.
template <class T, class F> __device__ T block_reduce(T v, T unit, F f) {
    __shared__ T parts[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int d = 16; d; d /= 2) v = f(v, __shfl_xor_sync(0xffffffffu, v, d));
    if (lane == 0) parts[warp] = v;
    __syncthreads();
    v = lane < warps ? parts[lane] : unit;
    for (int d = 16; d; d /= 2) v = f(v, __shfl_xor_sync(0xffffffffu, v, d));
    __syncthreads();
    return v;
}
