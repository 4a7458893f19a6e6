#include "rows.cuh"

template <class T, int WIDTH>
__global__ void embedding_forward_kernel(
    const T* __restrict__ table,    // [vocab, dim], strided
    const void* __restrict__ ids,   // [num_ids], of 64 bits if they are wide, else of 32
    T* __restrict__ output,         // [num_ids, dim]
    long long num_ids, long long vocab, long long dim, long long row_stride, long long column_stride, bool wide) {
    // One row of threads owns every (gridDim.x * blockDim.y)-th id, one thread every blockDim.x-th vector of its row.
    const T unknown(__int_as_float(0x7fffffff));  // NaN
    const long long step = gridDim.x * (long long)blockDim.y;
    for (long long at = blockIdx.x * (long long)blockDim.y + threadIdx.y; at < num_ids; at += step) {
        const long long row = wide ? ((const long long*)ids)[at] : ((const int*)ids)[at];
        const bool known = row >= 0 && row < vocab;
#pragma unroll 4
        for (long long column = threadIdx.x * WIDTH; column < dim; column += blockDim.x * WIDTH) {
            Vector<T, WIDTH> vector;
            if (known) vector = take<WIDTH>(table + row * row_stride, column, column_stride);
            else
#pragma unroll
                for (int j = 0; j < WIDTH; j++) vector.at[j] = unknown;
            vector.store(output + at * dim + column);
        }
    }
}

// Calls use(row, at) in each lane of a warp for 32 ids at a time: those from begin to before end, and then -1.
template <class Use> __device__ void each_id(const void* ids, bool wide, int begin, int end, Use use) {
    constexpr int LOADED = 8;
    const int lane = threadIdx.x % 32;
    for (int next = begin; next < end; next += 32 * LOADED) {
        long long row[LOADED];
#pragma unroll
        for (int i = 0; i < LOADED; i++) {
            const int at = next + i * 32 + lane;
            row[i] = at >= end ? -1 : wide ? ((const long long*)ids)[at] : ((const int*)ids)[at];
        }
#pragma unroll
        for (int i = 0; i < LOADED; i++) use(row[i], next + i * 32 + lane);
    }
}

// The places of ids in the order of their rows, those of one row in rising order, and where each row's begin.
constexpr int ORDER_ROWS = 64, ORDER_WARPS = 32;

__global__ void __launch_bounds__(32 * ORDER_WARPS) embedding_order_kernel(
    const void* __restrict__ ids,    // [num_ids], of 64 bits if they are wide, else of 32
    long long* __restrict__ order,   // [num_ids]
    long long* __restrict__ starts,  // [vocab + 1]
    int num_ids, long long vocab, bool wide) {
    // One block owns ORDER_ROWS rows of the table, one warp a part of the ids: once to count those of each row, and once
    // to write their places.
    __shared__ int slots[ORDER_WARPS][ORDER_ROWS], totals[ORDER_ROWS], before;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = (num_ids + blockDim.x - 1) / blockDim.x * 32;
    const int begin = min(warp * part, num_ids), end = min(begin + part, num_ids);
    const long long first_row = blockIdx.x * (long long)ORDER_ROWS, num_rows = min(vocab - first_row, (long long)ORDER_ROWS);
    for (int i = lane; i < ORDER_ROWS; i += 32) slots[warp][i] = 0;
    if (threadIdx.x == 0) before = 0;
    __syncthreads();
    int lower = 0;
    each_id(ids, wide, begin, end, [&](long long row, int) {
        lower += row >= 0 && row < first_row;
        if (row >= first_row && row < first_row + num_rows) atomicAdd(&slots[warp][row - first_row], 1);
    });
    lower = __reduce_add_sync(~0u, lower);
    if (lane == 0) atomicAdd(&before, lower);
    __syncthreads();
    const int mine = threadIdx.x;
    int sum = 0;
    if (mine < ORDER_ROWS) {
        for (int i = 0; i < ORDER_WARPS; i++) sum += slots[i][mine];
        totals[mine] = sum;
    }
    __syncthreads();
    if (mine < ORDER_ROWS) {
        int next = before;
        for (int i = 0; i < mine; i++) next += totals[i];
        if (mine < num_rows) starts[first_row + mine] = next;
        if (first_row + mine == vocab - 1) starts[vocab] = next + sum;
        for (int i = 0; i < ORDER_WARPS; i++) {
            const int count = slots[i][mine];
            slots[i][mine] = next;
            next += count;
        }
    }
    __syncthreads();
    each_id(ids, wide, begin, end, [&](long long row, int at) {
        const bool here = row >= first_row && row < first_row + num_rows;
        if (!__any_sync(~0u, here)) return;
        const unsigned like = __match_any_sync(~0u, here ? int(row - first_row) : -1), earlier = like & ((1u << lane) - 1);
        int slot = 0;
        if (here) slot = slots[warp][row - first_row] + __popc(earlier);
        __syncwarp();
        if (here) {
            order[slot] = at;
            if (!earlier) slots[warp][row - first_row] = slot + __popc(like);
        }
        __syncwarp();
    });
}

constexpr int SUM_THREADS = 256;

// With SHARED, the threads of a block share the cotangents of one row.
template <class T, int WIDTH, bool SHARED>
__global__ void __launch_bounds__(SUM_THREADS) embedding_backward_kernel(
    const T* __restrict__ grad_output,     // [ids, dim]
    const long long* __restrict__ order,   // [ids]
    const long long* __restrict__ starts,  // [vocab + 1]
    T* __restrict__ grad_table,            // [vocab, dim]
    long long vocab, long long dim, long long padding_idx) {
    // One row of threads owns blockDim.x vectors of a row of the table, or every blockDim.y-th run of its cotangents if
    // SHARED. The sums of RUN cotangents are added up, so that errors grow less than those of a single sum.
    constexpr int RUN = 32;
    using C = Compute<T>;
    const long long row = SHARED ? blockIdx.x : blockIdx.x * (long long)blockDim.y + threadIdx.y;
    const long long column = (blockIdx.y * (long long)blockDim.x + threadIdx.x) * WIDTH;
    if (!SHARED && row >= vocab) return;
    const long long begin = starts[row], end = row == padding_idx || column >= dim ? begin : starts[row + 1];
    C sums[WIDTH] = {};
    for (long long first = begin + (SHARED ? threadIdx.y * RUN : 0); first < end; first += SHARED ? blockDim.y * RUN : RUN) {
        C parts[WIDTH] = {};
#pragma unroll 8
        for (long long term = first; term < min(first + RUN, end); term++) {
            C terms[WIDTH];
            Vector<T, WIDTH>::load(grad_output + order[term] * dim + column).unpack(terms);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) parts[j] += terms[j];
        }
#pragma unroll
        for (int j = 0; j < WIDTH; j++) sums[j] += parts[j];
    }
    if constexpr (SHARED) {
        __shared__ C of_threads[WIDTH][SUM_THREADS];
        const int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) of_threads[j][thread] = sums[j];
        __syncthreads();
        if (threadIdx.y) return;
        for (int i = 1; i < blockDim.y; i++)
#pragma unroll
            for (int j = 0; j < WIDTH; j++) sums[j] += of_threads[j][i * blockDim.x + thread];
    }
    if (column >= dim) return;
    Vector<T, WIDTH> found;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) found.at[j] = T(sums[j]);
    found.store(grad_table + row * dim + column);
}
