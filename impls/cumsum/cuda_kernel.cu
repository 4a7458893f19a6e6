#include "rows.cuh"

constexpr int MOST_WARPS = 8;  // of a block

// The sums of tiles over the threads of a row before this one, and over all of them. Rows of several warps have a block
// each, and alternate between `turn` 0 and 1: see sum_over_row.
template <int TILES, class C> __device__ void scan(const C (&own)[TILES], C (&before)[TILES], C (&totals)[TILES], int turn) {
    __shared__ __align__(16) C parts[2][TILES][MOST_WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        C sum = own[t];
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            const C below = __shfl_up_sync(~0u, sum, lanes);
            if (lane >= lanes) sum += below;
        }
        before[t] = __shfl_up_sync(~0u, sum, 1);
        if (lane == 0) before[t] = C(0);
        totals[t] = __shfl_sync(~0u, sum, 31);
        if (blockDim.x > 32 && lane == 31) parts[turn][t][warp] = sum;
    }
    if (blockDim.x == 32) return;
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        totals[t] = C(0);
#pragma unroll
        for (int other = 0; other < MOST_WARPS; other++) {
            if (other == warp) before[t] += totals[t];
            totals[t] += other < blockDim.x / 32 ? parts[turn][t][other] : C(0);
        }
    }
}

template <class T, int TILES, bool GIVEN>
__global__ void __launch_bounds__(32 * MOST_WARPS, TILES == 1 && !GIVEN ? 6 : 1) cumsum_kernel(
    long long rows, const T* __restrict__ x,  // [outer, inner, n], strided
    long long inner, long long outer_stride, long long n, bool reverse, bool exclusive, bool wide, long long stride,
    T* __restrict__ output,  // [rows, n]
    long long inner_stride,
    const void* __restrict__ offsets,  // [segments + 1] of 64 bits if `wide`, else 32, strided; or null unless GIVEN
    long long segments, long long offset_stride) {
    // The threads of one y own every gridDim.y-th segment of a row, in tiles of as many vectors as there are threads. Of
    // TILES tiles, the loads and the sums over warps do not wait for one another. Parameters are in the order of their
    // use, because a kernel waits for them in lines of 64 bytes.
    using C = Compute<T>;
    constexpr int WIDTH = IN_16_BYTES<T>;
    const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    const auto in_vectors = [](const T* at) { return reinterpret_cast<unsigned long long>(at) % 16 == 0; };
    const auto end_of = [&](long long k) -> long long {
        k *= offset_stride;
        return wide ? static_cast<const long long*>(offsets)[k] : static_cast<const int*>(offsets)[k];
    };
    bool wrong = false;
    if constexpr (GIVEN) {
        wrong = end_of(0) != 0 || end_of(segments) != n;
        for (long long k = threadIdx.y * blockDim.x + threadIdx.x; k < segments; k += blockDim.x * blockDim.y)
            wrong = wrong || end_of(k) > end_of(k + 1);
        wrong = __syncthreads_or(wrong);
    }
    if (row >= rows) return;
    const T* from = x + row_offset(row, inner, outer_stride, inner_stride);
    T* to = output + row * n;
    // With invalid offsets, tiles take the place of segments, and their sums begin with NaN.
    const int tile = blockDim.x * WIDTH;
    const long long count = !GIVEN ? 1 : wrong ? (n + tile - 1) / tile : segments;
    int turn = 0;
    // The vectors of each warp, in the order of memory.
    __shared__ __align__(16) T exchanged[MOST_WARPS][32 * WIDTH];
    T* const exchange = exchanged[(threadIdx.y * blockDim.x + threadIdx.x) / 32];
    const int lane = threadIdx.x % 32, slot = reverse ? 31 - lane : lane;
    for (long long segment = GIVEN ? blockIdx.y : 0; segment < count; segment += GIVEN ? gridDim.y : 1) {
        const long long begin = !GIVEN ? 0 : wrong ? segment * tile : end_of(segment);
        const long long end = !GIVEN ? n : wrong ? min(begin + tile, n) : end_of(segment + 1);
        C carry = wrong ? C(__int_as_float(0x7fffffff)) : C(0);
        const long long size = end - begin, origin = reverse ? end : begin;
        // Tiles, and the vectors in them, are multiples of 16 bytes apart.
        const bool reads_vectors = stride == 1 && in_vectors(from + origin), writes_vectors = in_vectors(to + origin);
        for (long long first = 0; first < size; first += TILES * tile, turn ^= 1) {
            // In the order of summation, this thread's vector of tile t begins at at(t); in memory, at low(t). Both count
            // from `first`, and so does the end of the segment.
            const int left = int(min(size - first, (long long)TILES * tile));
            const long long here = reverse ? end - first : begin + first;
            const auto at = [&](int t) { return t * tile + int(threadIdx.x) * WIDTH; };
            const auto low = [&](int t) { return reverse ? -at(t) - WIDTH : at(t); };
            const auto exists = [&](int t, int k) {
                const int count = max(left - at(t), 0);
                return unsigned(reverse ? k + count - WIDTH : k) < count;
            };
            Vector<T, WIDTH> in[TILES];
            C own[TILES], before[TILES], totals[TILES];
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                if (reads_vectors && at(t) + WIDTH <= left) in[t] = Vector<T, WIDTH>::load(from + here + low(t));
                else
#pragma unroll
                    for (int k = 0; k < WIDTH; k++)
                        in[t].at[k] = exists(t, k) ? from[(here + low(t) + k) * stride] : T(0.0f);
            }
            const auto term = [&](int t, int j) { return C(in[t].at[reverse ? WIDTH - 1 - j : j]); };
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                C terms[WIDTH];
#pragma unroll
                for (int j = 0; j < WIDTH; j++) terms[j] = term(t, j);
                own[t] = sum_in_pairs(terms);
            }
            scan(own, before, totals, turn);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                C sum = carry + before[t], sums[WIDTH];
                carry += totals[t];
#pragma unroll
                for (int j = 0; j < WIDTH; j++) {
                    const C earlier = sum;
                    sum += term(t, j);
                    sums[j] = exclusive ? earlier : sum;
                }
                Vector<T, WIDTH> out;
#pragma unroll
                for (int k = 0; k < WIDTH; k++) out.at[k] = T(reverse ? sums[WIDTH - 1 - k] : sums[k]);
                T* const tile_to = to + here + low(t);
                if (writes_vectors) {
                    if (at(t) + WIDTH <= left) out.store(tile_to);
                    else
#pragma unroll
                        for (int k = 0; k < WIDTH; k++)
                            if (exists(t, k)) tile_to[k] = out.at[k];
                } else {
                    // The lanes exchange their vectors, and store neighbours.
                    out.store(exchange + slot * WIDTH);
                    __syncwarp();
                    T* const warp_to = tile_to - slot * WIDTH + lane;
                    const int of_warp = left - (at(t) - lane * WIDTH), place = reverse ? 32 * WIDTH - 1 - lane : lane;
#pragma unroll
                    for (int k = 0; k < WIDTH; k++)
                        if ((reverse ? place - k * 32 : place + k * 32) < of_warp) warp_to[k * 32] = exchange[k * 32 + lane];
                    __syncwarp();
                }
            }
        }
    }
}
