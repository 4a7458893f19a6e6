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

template <class T, int WIDTH>
__global__ void embedding_backward_kernel(
    const T* __restrict__ grad_output,     // [ids, dim]
    const long long* __restrict__ order,   // [ids]
    const long long* __restrict__ starts,  // [vocab + 1]
    T* __restrict__ grad_table,            // [vocab, dim]
    long long vocab, long long dim, long long padding_idx) {
    // One row of threads owns every (gridDim.x * blockDim.y)-th row of the table, one thread every blockDim.x-th vector
    // of it. The sums of RUN cotangents are added up, so that errors grow less than those of a single sum.
    constexpr int RUN = 64;
    using C = Compute<T>;
    const long long step = gridDim.x * (long long)blockDim.y;
    for (long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y; row < vocab; row += step) {
        const long long begin = starts[row], end = row == padding_idx ? begin : starts[row + 1];
        for (long long column = threadIdx.x * WIDTH; column < dim; column += blockDim.x * WIDTH) {
            C sums[WIDTH] = {};
            for (long long first = begin; first < end; first += RUN) {
                C parts[WIDTH] = {};
#pragma unroll 4
                for (long long term = first; term < min(first + RUN, end); term++) {
                    C terms[WIDTH];
                    Vector<T, WIDTH>::load(grad_output + order[term] * dim + column).unpack(terms);
#pragma unroll
                    for (int j = 0; j < WIDTH; j++) parts[j] += terms[j];
                }
#pragma unroll
                for (int j = 0; j < WIDTH; j++) sums[j] += parts[j];
            }
            Vector<T, WIDTH> found;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) found.at[j] = T(sums[j]);
            found.store(grad_table + row * dim + column);
        }
    }
}

// The ids of a block's rows that a warp keeps until their cotangents are added up.
constexpr int KEPT_IDS = 160, SCAN_THREADS = 512, SCAN_WARPS = SCAN_THREADS / 32;

// With SHARED, all threads of a block share the cotangents of one row.
template <class T, int WIDTH, int ROWS, bool SHARED>
__global__ void __launch_bounds__(SCAN_THREADS) embedding_backward_scan_kernel(
    const T* __restrict__ grad_output,  // [num_ids, dim]
    const void* __restrict__ ids,       // [num_ids], of 64 bits if they are wide, else of 32
    T* __restrict__ grad_table,         // [vocab, dim]
    int num_ids, long long vocab, long long dim, long long padding_idx, bool wide) {
    // One block owns ROWS * blockDim.y rows of the table, or one if SHARED, and blockDim.x vectors of them. Each warp searches its
    // part of the ids for these rows. The sums of 32 cotangents are added up, so that errors grow less than those of a
    // single sum.
    constexpr int TOGETHER = SHARED ? 8 : 4, LOADED = 4;
    __shared__ int kept_places[SCAN_WARPS][KEPT_IDS], places[SCAN_WARPS * KEPT_IDS];
    __shared__ unsigned short kept_rows[SCAN_WARPS][KEPT_IDS], rows[SCAN_WARPS * KEPT_IDS];
    __shared__ int counts[SCAN_WARPS];
    using C = Compute<T>;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int part = (num_ids + SCAN_THREADS - 1) / SCAN_THREADS * 32, end = min((warp + 1) * part, num_ids);
    const int num_rows = SHARED ? 1 : ROWS * blockDim.y;
    const long long first_row = blockIdx.x * (long long)num_rows;
    const long long column = (blockIdx.y * (long long)blockDim.x + threadIdx.x) * WIDTH;
    C sums[ROWS][WIDTH] = {};
    int next = warp * part;
    bool more;
    do {
        int count = 0;
        for (; next < end && count <= KEPT_IDS - 32 * LOADED; next += 32 * LOADED) {
            long long row[LOADED];
#pragma unroll
            for (int i = 0; i < LOADED; i++) {
                const int at = next + i * 32 + lane;
                row[i] = at >= end ? -1 : wide ? ((const long long*)ids)[at] : ((const int*)ids)[at];
            }
#pragma unroll
            for (int i = 0; i < LOADED; i++) {
                const bool here = row[i] >= first_row && row[i] < first_row + num_rows && row[i] != padding_idx;
                const unsigned lanes = __ballot_sync(~0u, here);
                if (here) {
                    const int number = count + __popc(lanes & ((1u << lane) - 1));
                    kept_places[warp][number] = next + i * 32 + lane;
                    kept_rows[warp][number] = (unsigned short)(row[i] - first_row);
                }
                count += __popc(lanes);
            }
        }
        if (lane == 0) counts[warp] = count;
        more = __syncthreads_or(next < end);
        int before = 0, total = 0;
        for (int i = 0; i < SCAN_WARPS; i++) {
            if (i < warp) before += counts[i];
            total += counts[i];
        }
        for (int i = lane; i < count; i += 32) {
            places[before + i] = kept_places[warp][i];
            rows[before + i] = kept_rows[warp][i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = SHARED ? 0 : i * blockDim.y + threadIdx.y;
            for (int first = SHARED ? threadIdx.y * 32 : 0; first < total; first += SHARED ? blockDim.y * 32 : 32) {
                unsigned left = __ballot_sync(~0u, first + lane < total && rows[first + lane] == row);
                if (column >= dim) continue;
                C parts[WIDTH] = {};
                while (left) {
                    Vector<T, WIDTH> terms[TOGETHER];
                    int number = 0;
#pragma unroll
                    for (int j = 0; j < TOGETHER; j++, left &= left - 1) {
                        if (!left) continue;
                        const long long place = places[first + __ffs(left) - 1];
                        terms[j] = Vector<T, WIDTH>::load(grad_output + place * dim + column);
                        number = j + 1;
                    }
#pragma unroll
                    for (int j = 0; j < TOGETHER; j++) {
                        if (j >= number) continue;
                        C numbers[WIDTH];
                        terms[j].unpack(numbers);
#pragma unroll
                        for (int k = 0; k < WIDTH; k++) parts[k] += numbers[k];
                    }
                }
#pragma unroll
                for (int k = 0; k < WIDTH; k++) sums[i][k] += parts[k];
            }
        }
        __syncthreads();
    } while (more);
    if constexpr (SHARED) {
        __shared__ C of_threads[SCAN_THREADS * WIDTH];
#pragma unroll
        for (int k = 0; k < WIDTH; k++) of_threads[k * SCAN_THREADS + thread] = sums[0][k];
        __syncthreads();
        if (threadIdx.y) return;
        for (int i = 1; i < blockDim.y; i++)
#pragma unroll
            for (int k = 0; k < WIDTH; k++) sums[0][k] += of_threads[k * SCAN_THREADS + i * blockDim.x + thread];
    }
    if (column >= dim) return;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const long long row = first_row + i * blockDim.y + threadIdx.y;
        if (row >= vocab) continue;
        Vector<T, WIDTH> result;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) result.at[k] = T(sums[i][k]);
        result.store(grad_table + row * dim + column);
    }
}
