#include "rows.cuh"

// Vectors of a row that a thread loads before it stores the first.
template <int WIDTH> constexpr int IN_FLIGHT = WIDTH == 1 ? 12 : 4;

template <class T, int WIDTH>
__global__ void embedding_forward_kernel(
    const void* __restrict__ ids,  // [num_ids], of 64 bits if they are wide, else of 32
    long long num_ids, bool wide, long long vocab,
    const T* __restrict__ table,  // [vocab, dim], strided
    long long row_stride, long long dim, long long column_stride,
    T* __restrict__ output) {  // [num_ids, dim]
    // A row of threads, a warp or less if it then has a thread for each vector, owns every (gridDim.x * blockDim.y)-th id,
    // one thread every 32nd vector of its row. The parameters are in the order of their use, because a kernel waits for
    // them in lines of 64 bytes.
    constexpr int STEP = 32 * WIDTH, BATCH = IN_FLIGHT<WIDTH> * STEP;
    const T unknown(__int_as_float(0x7fffffff));  // NaN
    long long at = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    for (; at < num_ids; at += gridDim.x * (long long)blockDim.y) {
        const long long row = wide ? ((const long long*)ids)[at] : ((const int*)ids)[at];
        const bool known = row >= 0 && row < vocab;
        const T* const row_from = table + (known ? row * row_stride : 0);
#pragma unroll 1
        for (long long first = threadIdx.x * WIDTH; first < dim; first += BATCH) {
            const int stored = int(min(dim - first, (long long)BATCH)), loaded = known ? stored : 0;
            const T* from = row_from + first * column_stride;
            T* const to = computed_here(output + at * dim + first);
            Vector<T, WIDTH> vectors[IN_FLIGHT<WIDTH>];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT<WIDTH>; k++) {
#pragma unroll
                for (int j = 0; j < WIDTH; j++) vectors[k].at[j] = unknown;
                from = computed_here(from);
                if (k * STEP < loaded) vectors[k] = Vector<T, WIDTH>::load(from);
                from += STEP * column_stride;
            }
#pragma unroll
            for (int k = 0; k < IN_FLIGHT<WIDTH>; k++)
                if (k * STEP < stored) vectors[k].store(to + k * STEP);
        }
    }
}

// Loads the ids of a warp from `next` to before `end`, every 32nd in a lane. Those past the end are -1.
constexpr int LOADED = 16;
__device__ void load_ids(long long (&rows)[LOADED], const void* ids, bool wide, int next, int end) {
#pragma unroll
    for (int i = 0; i < LOADED; i++) {
        const int at = next + i * 32 + threadIdx.x % 32;
        rows[i] = at >= end ? -1 : wide ? ((const long long*)ids)[at] : ((const int*)ids)[at];
    }
}

// The places of ids in the order of their rows, those of one row in rising order, and where each row's begin.
constexpr int MOST_ROWS = 64, MOST_WARPS = 32;

__global__ void __launch_bounds__(32 * MOST_WARPS) embedding_order_kernel(
    const void* __restrict__ ids,    // [num_ids], of 64 bits if they are wide, else of 32
    long long* __restrict__ order,   // [num_ids]
    long long* __restrict__ starts,  // [vocab + 1]
    int* __restrict__ ready,         // [num_ready]
    int num_ids, long long vocab, long long num_ready, int rows, bool wide) {
    // One block owns some rows of the table, one warp a part of the ids: once to count those of each row, and once
    // to write their places. The blocks also write zeros to ready.
    __shared__ int slots[MOST_WARPS][MOST_ROWS], totals[MOST_ROWS], before;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = (num_ids + blockDim.x - 1) / blockDim.x * 32;
    const int begin = min(warp * part, num_ids), end = min(begin + part, num_ids);
    const long long first_row = blockIdx.x * (long long)rows, num_rows = min(vocab - first_row, (long long)rows);
    for (int i = lane; i < rows; i += 32) slots[warp][i] = 0;
    if (threadIdx.x == 0) before = 0;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < num_ready; i += gridDim.x * blockDim.x) ready[i] = 0;
    __syncthreads();
    int lower = 0;
    long long found[LOADED];
    for (int next = begin; next < end; next += 32 * LOADED) {
        load_ids(found, ids, wide, next, end);
#pragma unroll
        for (const long long row : found) {
            lower += row >= 0 && row < first_row;
            if (row >= first_row && row < first_row + num_rows) atomicAdd(&slots[warp][row - first_row], 1);
        }
    }
    lower = __reduce_add_sync(~0u, lower);
    if (lane == 0) atomicAdd(&before, lower);
    __syncthreads();
    const int mine = threadIdx.x, warps = blockDim.x / 32;
    int sum = 0;
    if (mine < rows) {
        for (int i = 0; i < warps; i++) sum += slots[i][mine];
        totals[mine] = sum;
    }
    __syncthreads();
    if (mine < rows) {
        int next = before;
        for (int i = 0; i < mine; i++) next += totals[i];
        if (mine < num_rows) starts[first_row + mine] = next;
        if (first_row + mine == vocab - 1) starts[vocab] = next + sum;
#pragma unroll 8
        for (int i = 0; i < warps; i++) {
            const int count = slots[i][mine];
            slots[i][mine] = next;
            next += count;
        }
    }
    __syncthreads();
    for (int next = begin; next < end; next += 32 * LOADED) {
        if (end - begin > 32 * LOADED) load_ids(found, ids, wide, next, end);
#pragma unroll
        for (int i = 0; i < LOADED; i++) {
            const long long row = found[i] - first_row;
            const bool here = row >= 0 && row < num_rows;
            if (!__any_sync(~0u, here)) continue;
            const unsigned like = __match_any_sync(~0u, here ? int(row) : -1), earlier = like & ((1u << lane) - 1);
            int slot = 0;
            if (here) slot = slots[warp][row] + __popc(earlier);
            __syncwarp();
            if (here) {
                order[slot] = next + i * 32 + lane;
                if (!earlier) slots[warp][row] = slot + __popc(like);
            }
            __syncwarp();
        }
    }
}

constexpr int SUM_WARPS = 8, CHUNK = 64;

// The columns of a lane: a vector, or four single ones 32 apart, so that few warps wait for as much as those of vectors.
template <int WIDTH> constexpr int COLUMNS = WIDTH == 1 ? 4 : WIDTH;
template <int WIDTH> __device__ long long column_of(int j) {
    const long long tile = blockIdx.y * 32ll * COLUMNS<WIDTH>;
    return WIDTH == 1 ? tile + j * 32 + threadIdx.x % 32 : tile + threadIdx.x % 32 * WIDTH + j;
}

// Adds up, in each lane of a warp, its columns of the cotangents of ids whose numbers in the order are from first to
// before end. The sums of TOGETHER ones are added up, so that errors grow less than those of a single sum.
template <class T, int WIDTH, class C, class Place>
__device__ void add_up(
    C (&sums)[COLUMNS<WIDTH>], const T* grad_output, const Place* order, long long first, long long end, long long dim) {
    constexpr int TOGETHER = 8, PIECES = COLUMNS<WIDTH> / WIDTH;
    const int lane = threadIdx.x % 32;
    const T* from[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        from[i] = grad_output + (column_of<WIDTH>(i * WIDTH) < dim ? column_of<WIDTH>(i * WIDTH) : 0);
    for (; first < end; first += 32) {
        const int count = int(min(end - first, 32ll));
        const long long mine = order[first + min(lane, count - 1)];
        for (int next = 0; next < count; next += TOGETHER) {
            Vector<T, COLUMNS<WIDTH>> terms[TOGETHER];
            C parts[COLUMNS<WIDTH>] = {};
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) {
                const long long at = __shfl_sync(~0u, mine, next + k) * dim;
#pragma unroll
                for (int i = 0; i < PIECES; i++) {
                    const auto term = Vector<T, WIDTH>::load(from[i] + at);
                    memcpy(&terms[k].at[i * WIDTH], &term, sizeof term);
                }
            }
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) {
                C numbers[COLUMNS<WIDTH>];
                terms[k].unpack(numbers);
#pragma unroll
                for (int j = 0; j < COLUMNS<WIDTH>; j++) parts[j] += next + k < count ? numbers[j] : C(0);
            }
#pragma unroll
            for (int j = 0; j < COLUMNS<WIDTH>; j++) sums[j] += parts[j];
        }
    }
}

// Stores the columns of a lane in a row.
template <class T, int WIDTH, class C> __device__ void store(T* row, const C (&sums)[COLUMNS<WIDTH>], long long dim) {
#pragma unroll
    for (int j = 0; j < COLUMNS<WIDTH>; j += WIDTH) {
        Vector<T, WIDTH> rounded;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) rounded.at[i] = T(sums[j + i]);
        if (column_of<WIDTH>(j) < dim) rounded.store(row + column_of<WIDTH>(j));
    }
}

constexpr int FEW_IDS = 512;

template <class T, int WIDTH>
__global__ void __launch_bounds__(32 * SUM_WARPS) embedding_few_backward_kernel(
    const T* __restrict__ grad_output,  // [ids, dim]
    const void* __restrict__ ids,       // [ids], at most FEW_IDS, of 64 bits if they are wide, else of 32
    T* __restrict__ grad_table,         // [vocab, dim]
    int num_ids, long long vocab, long long dim, long long padding_idx, bool wide) {
    // One warp owns a tile of columns of a row of the table, and searches all ids for this row.
    __shared__ int places[SUM_WARPS][FEW_IDS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long row = blockIdx.x * (long long)SUM_WARPS + warp;
    if (row >= vocab) return;
    int count = 0;
    long long rows[LOADED];
    static_assert(32 * LOADED == FEW_IDS);
    load_ids(rows, ids, wide, 0, num_ids);
#pragma unroll
    for (int i = 0; i < LOADED; i++) {
        const bool found = rows[i] == row && row != padding_idx;
        const unsigned lanes = __ballot_sync(~0u, found);
        if (found) places[warp][count + __popc(lanes & ((1u << lane) - 1))] = i * 32 + lane;
        count += __popc(lanes);
    }
    __syncwarp();
    Compute<T> sums[COLUMNS<WIDTH>] = {};
    add_up<T, WIDTH>(sums, grad_output, places[warp], 0, count, dim);
    store<T, WIDTH>(grad_table + row * dim, sums, dim);
}

// The sum of the same lane of all warps, in the first warp.
template <int COUNT, class C> __device__ void sum_over_warps(C (&sums)[COUNT]) {
    __shared__ C of_warps[SUM_WARPS][COUNT][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < COUNT; j++) of_warps[warp][j][lane] = sums[j];
    __syncthreads();
    if (warp == 0)
        for (int i = 1; i < SUM_WARPS; i++)
#pragma unroll
            for (int j = 0; j < COUNT; j++) sums[j] += of_warps[i][j][lane];
    __syncthreads();
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(32 * SUM_WARPS) embedding_backward_kernel(
    const T* __restrict__ grad_output,     // [ids, dim]
    const void* __restrict__ ids,          // [ids], of 64 bits if they are wide, else of 32
    const long long* __restrict__ order,   // [ids]
    const long long* __restrict__ starts,  // [vocab + 1]
    int* __restrict__ ready,               // [gridDim.y, num_chunks], of zeros
    Compute<T>* __restrict__ chunks,       // [num_chunks, dim]
    T* __restrict__ grad_table,            // [vocab, dim]
    long long num_chunks, long long vocab, long long dim, long long padding_idx, bool wide) {
    // One block owns a tile of columns of a chunk of CHUNK cotangents of a row, whose last chunk is longer, or one warp that
    // of a row of fewer cotangents. Chunk i of a row is number i of the multiples of CHUNK in its part of the order.
    __shared__ bool last;
    const int warp = threadIdx.x / 32;
    Compute<T> sums[COLUMNS<WIDTH>] = {};
    if (blockIdx.x >= num_chunks) {
        const long long row = (blockIdx.x - num_chunks) * SUM_WARPS + warp;
        if (row >= vocab) return;
        const long long begin = starts[row], end = row == padding_idx ? begin : starts[row + 1];
        if (end - begin >= CHUNK) return;
        add_up<T, WIDTH>(sums, grad_output, order, begin, end, dim);
        store<T, WIDTH>(grad_table + row * dim, sums, dim);
        return;
    }
    const long long middle = blockIdx.x * (long long)CHUNK;
    if (middle >= starts[vocab]) return;
    const long long row = wide ? ((const long long*)ids)[order[middle]] : ((const int*)ids)[order[middle]];
    if (row < 0 || row == padding_idx) return;  // ids below 0 come first in sorted ones
    const long long begin = starts[row], first_chunk = (begin + CHUNK - 1) / CHUNK, number = blockIdx.x - first_chunk;
    const long long count = (starts[row + 1] - begin) / CHUNK;
    if (number >= count) return;
    const long long first = begin + number * CHUNK, end = number < count - 1 ? first + CHUNK : starts[row + 1];
    const long long part = (end - first + SUM_WARPS - 1) / SUM_WARPS;
    add_up<T, WIDTH>(sums, grad_output, order, first + warp * part, min(first + (warp + 1) * part, end), dim);
    sum_over_warps(sums);
    if (warp == 0)
#pragma unroll
        for (int j = 0; j < COLUMNS<WIDTH>; j++)
            if (column_of<WIDTH>(j) < dim) chunks[blockIdx.x * dim + column_of<WIDTH>(j)] = sums[j];
    __syncthreads();
    // The last block to finish a chunk of this row adds them up.
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&ready[blockIdx.y * num_chunks + first_chunk], 1) == count - 1;
    }
    __syncthreads();
    if (!last) return;
#pragma unroll
    for (int j = 0; j < COLUMNS<WIDTH>; j++) sums[j] = 0;
#pragma unroll 4
    for (long long i = first_chunk + warp; i < first_chunk + count; i += SUM_WARPS)
#pragma unroll
        for (int j = 0; j < COLUMNS<WIDTH>; j++)
            if (column_of<WIDTH>(j) < dim) sums[j] += __ldcg(&chunks[i * dim + column_of<WIDTH>(j)]);  // from the L2 cache
    sum_over_warps(sums);
    if (warp == 0) store<T, WIDTH>(grad_table + row * dim, sums, dim);
}
