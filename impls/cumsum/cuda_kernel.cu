#include "rows.cuh"

// What the threads of a row before this one have, and in `total` what all of them have. Rows of several warps have a
// block each, and alternate between `turn` 0 and 1: see sum_over_row.
template <class C> __device__ C sum_before(C own, C& total, int turn) {
    __shared__ C parts[2][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    C sum = own;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const C below = __shfl_up_sync(~0u, sum, lanes);
        if (lane >= lanes) sum += below;
    }
    C before = __shfl_up_sync(~0u, sum, 1);
    if (lane == 0) before = C(0);
    total = __shfl_sync(~0u, sum, 31);
    if (blockDim.x > 32) {
        if (lane == 31) parts[turn][warp] = sum;
        __syncthreads();
        total = C(0);
        for (int other = 0; other < blockDim.x / 32; other++) {
            if (other == warp) before += total;
            total += parts[turn][other];
        }
    }
    return before;
}

template <class T>
__global__ void cumsum_kernel(
    const T* __restrict__ x,           // [outer, inner, n], strided
    const void* __restrict__ offsets,  // [segments + 1] of 64 bits if `wide`, else 32, strided; or null
    T* __restrict__ output,            // [rows, n]
    long long rows, long long n, long long inner, long long outer_stride, long long inner_stride, long long stride,
    long long segments, long long offset_stride, bool wide, bool exclusive, bool reverse) {
    // The threads of one y own every gridDim.y-th segment of a row, in tiles of as many vectors as there are threads.
    using C = Compute<T>;
    constexpr int WIDTH = IN_16_BYTES<T>;
    const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    const auto in_vectors = [](const T* at) { return reinterpret_cast<unsigned long long>(at) % 16 == 0; };
    const auto end_of = [&](long long k) -> long long {
        if (!offsets) return k * n;
        k *= offset_stride;
        return wide ? static_cast<const long long*>(offsets)[k] : static_cast<const int*>(offsets)[k];
    };
    bool wrong = end_of(0) != 0 || end_of(segments) != n;
    for (long long k = threadIdx.y * blockDim.x + threadIdx.x; k < segments; k += blockDim.x * blockDim.y)
        wrong = wrong || end_of(k) > end_of(k + 1);
    wrong = __syncthreads_or(wrong);
    if (row >= rows) return;
    const T* from = x + row_offset(row, inner, outer_stride, inner_stride);
    T* to = output + row * n;
    // With invalid offsets, tiles take the place of segments, and their sums begin with NaN.
    const long long tile = blockDim.x * WIDTH, count = wrong ? (n + tile - 1) / tile : segments;
    int turn = 0;
    for (long long segment = blockIdx.y; segment < count; segment += gridDim.y) {
        const long long begin = wrong ? segment * tile : end_of(segment);
        const long long end = wrong ? min(begin + tile, n) : end_of(segment + 1);
        C carry = wrong ? C(__int_as_float(0x7fffffff)) : C(0);
        for (long long first = 0; first < end - begin; first += tile, turn ^= 1) {
            // In the order of summation this thread's vector begins at `at`, in memory at `low`.
            const long long at = first + threadIdx.x * WIDTH, low = reverse ? end - at - WIDTH : begin + at;
            const bool whole = at + WIDTH <= end - begin;
            Vector<T, WIDTH> in, out;
            if (whole && stride == 1 && in_vectors(from + low)) in = Vector<T, WIDTH>::load(from + low);
            else
#pragma unroll
                for (int k = 0; k < WIDTH; k++)
                    in.at[k] = low + k >= begin && low + k < end ? from[(low + k) * stride] : T(0.0f);
            C term[WIDTH], own(0), total;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) own += term[j] = C(reverse ? in.at[WIDTH - 1 - j] : in.at[j]);
            C sum = carry + sum_before(own, total, turn);
            carry += total;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const C before = sum;
                sum += term[j];
                term[j] = exclusive ? before : sum;
            }
#pragma unroll
            for (int k = 0; k < WIDTH; k++) out.at[k] = T(reverse ? term[WIDTH - 1 - k] : term[k]);
            if (whole && in_vectors(to + low)) out.store(to + low);
            else
#pragma unroll
                for (int k = 0; k < WIDTH; k++)
                    if (low + k >= begin && low + k < end) to[low + k] = out.at[k];
        }
    }
}
