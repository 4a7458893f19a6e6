// Attention of one query for each sequence over a paged cache, after Flash-Decoding: splits, and a kernel that merges.
#include <math_constants.h>

#include "attention/products.cuh"
#include "exponential.cuh"

// The tokens of a warp's step, the steps whose keys and values are in shared memory, and the warps of a block.
constexpr int KEYS = 16;
template <class T> constexpr int STAGES = sizeof(T) == 8 ? 2 : 3;
template <class T> constexpr int WARPS = sizeof(T) == 2 ? 4 : sizeof(T) == 4 ? 2 : 1;
template <class T> constexpr int THREADS = WARPS<T> * 32;

// The length of a sequence, 0 if it is invalid, and the tokens of each split, in whole steps of a block.
template <class T> struct Share {
    long long length, tokens;
    bool fits;

    __device__ Share(long long given, long long capacity, long long splits) : fits(given >= 0 && given <= capacity) {
        constexpr int STEP = WARPS<T> * KEYS;
        length = fits ? given : 0;
        tokens = ((length + splits - 1) / splits + STEP - 1) / STEP * STEP;
    }
};

template <class C> __device__ C base_of(C largest) { return largest == -C(CUDART_INF_F) ? C(0) : largest; }

// The result of sums of values and of exponentials.
template <class T> __device__ T quotient(Compute<T> sum, Compute<T> total, const Share<T>& share) {
    if (!share.fits) return T(CUDART_NAN_F);
    return T(share.length ? sum / total : Compute<T>(0));
}

template <class T, int COLUMNS>
__global__ void __launch_bounds__(THREADS<T>) paged_attention_split_kernel(
    const T* __restrict__ q,            // [sequences, heads, columns]
    const T* __restrict__ k,            // [pages, page_size, kv_heads, columns], strided
    const T* __restrict__ v,            // [pages, page_size, kv_heads, columns], strided
    const int* __restrict__ table,      // [sequences, pages_per_sequence]
    const int* __restrict__ lengths,    // [sequences]
    T* __restrict__ output,             // [sequences, heads, columns]
    Compute<T>* __restrict__ sums_to,   // [sequences, heads, splits, columns], unless there is one split
    Compute<T>* __restrict__ tops_to,   // [sequences, heads, splits]
    Compute<T>* __restrict__ totals_to, // [sequences, heads, splits]
    long long pages, long long page_size, long long pages_per_sequence, long long heads, long long kv_heads,
    long long columns, long long k_page_stride, long long k_token_stride, long long k_head_stride,
    long long v_page_stride, long long v_token_stride, long long v_head_stride, long long splits, bool vectors,
    double scale_) {
    // One block owns up to 16 heads of one key head, and a split of the tokens of one sequence; one warp every WARPS-th
    // step of KEYS tokens. Neighbours take the other key heads of the same tokens, which lie beside them.
    using C = Compute<T>;
    constexpr int PAD = 16 / sizeof(T), LINE_OF_WEIGHTS = KEYS + PAD, AHEAD = STAGES<T> - 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = int(columns + 15) / 16 * 16, line = width + PAD;
    const long long group = heads / kv_heads, tiles = (group + 15) / 16, kv_head = blockIdx.x % kv_heads;
    const long long rest = blockIdx.x / kv_heads, tile = rest % tiles, split = rest / tiles % splits;
    const long long sequence = rest / tiles / splits, head = kv_head * group + tile * 16;
    const int rows = int(min(group - tile * 16, 16ll));
    const Share<T> share(lengths[sequence], pages_per_sequence * page_size, splits);
    const long long begin = split * share.tokens, end = min(begin + share.tokens, share.length);
    if (splits > 1 && begin >= end) return;

    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ C tops[WARPS<T>][16], totals[WARPS<T>][16];
    T* const q_tile = reinterpret_cast<T*>(shared);
    T* const weights = q_tile + 16 * line + warp * 16 * LINE_OF_WEIGHTS;
    T* const stages = q_tile + 16 * line + WARPS<T> * 16 * LINE_OF_WEIGHTS;
    T* const own = stages + warp * STAGES<T> * 2 * KEYS * line;
    load_tile(q_tile, line, 16, width, q + (sequence * heads + head) * columns, columns, rows, columns, vectors);
    commit_copies();
    wait_for_copies<0>();
    // Zeros past the columns, where no copy is made.
    const int past = width - int(columns);
    for (int i = lane; i < STAGES<T> * 2 * KEYS * past; i += 32) own[i / past * line + columns + i % past] = T(0.0f);
    __syncthreads();

    k += kv_head * k_head_stride;
    v += kv_head * v_head_stride;
    table += sequence * pages_per_sequence;
    const long long first = begin + warp * KEYS;
    const int steps = first < end ? int((end - first + WARPS<T> * KEYS - 1) / (WARPS<T> * KEYS)) : 0;
    bool lost = false;
    // The page of the lane's token of a step, or -1.
    const auto look = [&](int step) {
        const long long token = first + (long long)step * WARPS<T> * KEYS + lane % KEYS;
        if (token >= end) return -1;
        const int page = table[unsigned(token) / unsigned(page_size)];
        const bool known = page >= 0 && page < pages;
        lost |= !known;
        return known ? page : -1;
    };
    // Begins to copy the keys and values of a step, and zeros where there are none.
    const auto fetch = [&](int step, int page) {
        T* const to = own + step % STAGES<T> * 2 * KEYS * line;
        const long long slot = unsigned(first + (long long)step * WARPS<T> * KEYS + lane % KEYS) % unsigned(page_size);
        const long long k_offset = page * k_page_stride + slot * k_token_stride;
        const long long v_offset = page * v_page_stride + slot * v_token_stride;
        if (!vectors) {
#pragma unroll 1
            for (int row = 0; row < KEYS; row++) {
                const bool lost = __shfl_sync(~0u, page, row) < 0;
                const T* const k_from = k + __shfl_sync(~0u, k_offset, row);
                const T* const v_from = v + __shfl_sync(~0u, v_offset, row);
                for (int column = lane; column < columns; column += 32) {
                    to[row * line + column] = lost ? T(0.0f) : k_from[column];
                    to[(KEYS + row) * line + column] = lost ? T(0.0f) : v_from[column];
                }
            }
            return;
        }
        // The lanes of a warp take the vectors of one row, or of several.
        constexpr int ACROSS = COLUMNS / PAD, LANES = ACROSS < 32 ? ACROSS : 32;
#pragma unroll
        for (int start = 0; start < KEYS; start += 32 / LANES) {
            const int row = start + lane / LANES;
            const bool lost = __shfl_sync(~0u, page, row) < 0;
            const T* const k_from = k + __shfl_sync(~0u, k_offset, row);
            const T* const v_from = v + __shfl_sync(~0u, v_offset, row);
#pragma unroll
            for (int vector = lane % LANES; vector < ACROSS; vector += LANES) {
                if (vector * PAD >= columns) continue;
                T* const k_to = to + row * line + vector * PAD;
                copy_async(k_to, k_from + vector * PAD, lost);
                copy_async(k_to + KEYS * line, v_from + vector * PAD, lost);
            }
        }
    };

    const C scale = C(scale_);
    Sums<T, COLUMNS> sums;
    C largest[2] = {-C(CUDART_INF_F), -C(CUDART_INF_F)}, total[2] = {};
    int page = look(0);
    for (int step = 0; step < AHEAD; step++) {
        if (step < steps) {
            fetch(step, page);
            page = look(step + 1);
        }
        commit_copies();
    }
    for (int step = 0; step < steps; step++) {
        wait_for_copies<AHEAD - 1>();
        __syncwarp();
        if (step + AHEAD < steps) {
            fetch(step + AHEAD, page);
            page = look(step + AHEAD + 1);
        }
        commit_copies();
        const T* const k_tile = own + step % STAGES<T> * 2 * KEYS * line;
        const long long there = end - first - (long long)step * WARPS<T> * KEYS;
        Sums<T, KEYS> scores;
        scores.template add<true>(q_tile, line, k_tile, line, width);
        C larger[2] = {largest[0], largest[1]}, base[2], shrunk[2];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                C& score = scores.at[n][e];
                score = column_of(n, e) < there ? score * scale : -C(CUDART_INF_F);
                larger[e / 2] = max(larger[e / 2], score);
            }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            larger[i] = max(larger[i], __shfl_xor_sync(~0u, larger[i], 1));
            larger[i] = max(larger[i], __shfl_xor_sync(~0u, larger[i], 2));
            base[i] = base_of(larger[i]);
            shrunk[i] = exponential(largest[i] - base[i]);
            largest[i] = larger[i];
            total[i] *= shrunk[i];
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const C term = exponential(scores.at[n][e] - base[e / 2]);
                total[e / 2] += term;
                weights[row_of(e) * LINE_OF_WEIGHTS + column_of(n, e)] = T(term);
            }
        sums.scale(shrunk);
        __syncwarp();
        sums.template add<false>(weights, LINE_OF_WEIGHTS, k_tile + KEYS * line, line, KEYS, width);
    }

    // The warps' results are merged in shared memory, in place of keys and values.
    const bool any_lost = __any_sync(~0u, lost);
    __syncthreads();
    C* const parts = reinterpret_cast<C*>(stages);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] += __shfl_xor_sync(~0u, total[i], 1);
        total[i] += __shfl_xor_sync(~0u, total[i], 2);
        if (lane % 4 == 0) {
            tops[warp][row_of(2 * i)] = largest[i];
            totals[warp][row_of(2 * i)] = any_lost ? C(CUDART_NAN_F) : total[i];
        }
    }
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (row_of(e) < rows && column_of(n, e) < columns)
                parts[(warp * 16 + row_of(e)) * columns + column_of(n, e)] = sums.at[n][e];
    __syncthreads();
    for (int i = threadIdx.x; i < rows * int(columns); i += THREADS<T>) {
        const int row = i / int(columns), column = i % int(columns);
        C top = -C(CUDART_INF_F), sum = 0, all = 0;
        for (int w = 0; w < WARPS<T>; w++) top = max(top, tops[w][row]);
        for (int w = 0; w < WARPS<T>; w++) {
            const C factor = exponential(tops[w][row] - base_of(top));
            sum += factor * parts[(w * 16 + row) * columns + column];
            all += factor * totals[w][row];
        }
        const long long at = sequence * heads + head + row;
        if (splits == 1) {
            output[at * columns + column] = quotient<T>(sum, all, share);
            continue;
        }
        sums_to[(at * splits + split) * columns + column] = sum;
        if (column) continue;
        tops_to[at * splits + split] = top;
        totals_to[at * splits + split] = all;
    }
}

template <class T>
__global__ void paged_attention_merge_kernel(
    const int* __restrict__ lengths,        // [sequences]
    const Compute<T>* __restrict__ sums,    // [sequences, heads, splits, columns]
    const Compute<T>* __restrict__ tops,    // [sequences, heads, splits]
    const Compute<T>* __restrict__ totals,  // [sequences, heads, splits]
    T* __restrict__ output,                 // [sequences, heads, columns]
    long long capacity, long long heads, long long columns, long long splits) {
    // One block owns one head of one sequence, one thread every blockDim.x-th column. Splits are added in their order.
    using C = Compute<T>;
    const long long row = blockIdx.x;
    const Share<T> share(lengths[row / heads], capacity, splits);
    const int used = share.length ? int((share.length + share.tokens - 1) / share.tokens) : 0;
    C top = -C(CUDART_INF_F);
    for (int split = 0; split < used; split++) top = max(top, tops[row * splits + split]);
    for (long long column = threadIdx.x; column < columns; column += blockDim.x) {
        C sum = 0, total = 0;
#pragma unroll 4
        for (int split = 0; split < used; split++) {
            const long long at = row * splits + split;
            const C factor = exponential(tops[at] - base_of(top));
            total += factor * totals[at];
            sum += factor * sums[at * columns + column];
        }
        output[row * columns + column] = quotient<T>(sum, total, share);
    }
}
