// Rows of strided tensors: where they lie, and sums over them.
#pragma once
#include "vectors.cuh"

template <class T> constexpr int IN_16_BYTES = 16 / sizeof(T);

struct Divided { long long quotient, rest; };

// A row divided by a size, of which the host gives the `reciprocal`: (2^63 - 1) / size. The product with it, divided by
// 2^63, is the quotient or one less. A division of 64 bits takes as long as a short row.
__device__ inline Divided divided(long long row, long long size, long long reciprocal) {
    const long long quotient = __umul64hi(2 * (unsigned long long)row, reciprocal), rest = row - quotient * size;
    return rest < size ? Divided{quotient, rest} : Divided{quotient + 1, rest - size};
}

// Code that few calls need, which the compiler places behind the rest: the instructions of a short kernel are then loaded
// without a jump.
#ifdef CUDA_ON_CPU
#define ASIDE
#else
#define ASIDE __noinline__
#endif

// The offset of one of fewer than 2^42 rows of [outer, inner, cols].
ASIDE __device__ long long divided_row_offset(
    long long row, long long inner, long long outer_stride, long long inner_stride) {
    // A division of 64 bits takes as long as a short row. Each product with the reciprocal has a relative error of less
    // than 2^-20, so that the sum of two, each rounded down, misses the quotient by one at most.
    const float reciprocal = __fdividef(1.0f, float(inner));
    long long outer = (long long)floorf(float(row) * reciprocal);
    outer += (long long)floorf(float(row - outer * inner) * reciprocal);
    const long long rest = row - outer * inner;
    outer += (rest >= inner) - (rest < 0);
    return outer * outer_stride + (row - outer * inner) * inner_stride;
}
__device__ inline long long row_offset(long long row, long long inner, long long outer_stride, long long inner_stride) {
    if (inner == 1) return row * outer_stride;
    return divided_row_offset(row, inner, outer_stride, inner_stride);
}

// Loads WIDTH neighbouring columns, or one column of a strided row.
template <int WIDTH, bool STRIDED = WIDTH == 1, class T>
__device__ Vector<T, WIDTH> take(const T* from, long long column, long long stride) {
    return Vector<T, WIDTH>::load(from + (STRIDED ? column * stride : column));
}

template <class C> struct Sums {
    C first, second;
};

// Combines the values of a row's lanes, a power of two up to 32. Only the first of the shuffles is left out where a row has
// fewer lanes, because a jump past one takes a third of its time.
template <class C, class Combine> __device__ inline C over_lanes(C value, int lanes, Combine combine) {
    if (lanes > 16) value = combine(value, __shfl_xor_sync(~0u, value, 16));
#pragma unroll
    for (int step = 8; step; step /= 2) {
        const C other = __shfl_xor_sync(~0u, value, step);
        if (step < lanes) value = combine(value, other);
    }
    return value;
}
template <class C> __device__ inline C sum_of_lanes(C value, int lanes) {
    return over_lanes(value, lanes, [](C a, C b) { return a + b; });
}

template <class C> __device__ C add_half_of_lanes(C sum) {
#pragma unroll
    for (int lanes = 8; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    return sum;
}

// The sums over the threads of a row, returned in each of them. Short rows share a warp: a power of two of lanes each. A
// row of several warps has a block of its own, which alternates between `turn` 0 and 1: a thread that writes has passed
// the other turn's barrier, and before that barrier all threads had read this turn's parts.
template <class C> __device__ Sums<C> sum_over_row(Sums<C> sums, int turn) {
    if (blockDim.x < 32) {
#pragma unroll
        for (int step = 8; step; step /= 2) {
            const C first = __shfl_xor_sync(~0u, sums.first, step), second = __shfl_xor_sync(~0u, sums.second, step);
            if (step >= blockDim.x) continue;
            sums.first += first;
            sums.second += second;
        }
        return sums;
    }
    __shared__ C parts[2][2][16];
    // Each half of the lanes continues with one of the two sums, which halves the number of shuffles.
    const int lane = threadIdx.x % 32, half = lane / 16;
    C sum = half ? sums.second : sums.first;
    sum += __shfl_xor_sync(~0u, half ? sums.first : sums.second, 16);
    sum = add_half_of_lanes(sum);
    if (blockDim.x > 32) {
        if (lane % 16 == 0) parts[turn][half][threadIdx.x / 32] = sum;
        __syncthreads();
        sum = add_half_of_lanes(lane % 16 < blockDim.x / 32 ? parts[turn][half][lane % 16] : C(0));
    }
    return {__shfl_sync(~0u, sum, 0), __shfl_sync(~0u, sum, 16)};
}
