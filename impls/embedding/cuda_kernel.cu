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

// The ids that a warp has found before the block adds up their cotangents.
constexpr int FOUND = 256;

template <class T, int WIDTH, int ROWS>
__global__ void embedding_backward_scan_kernel(
    const T* __restrict__ grad_output,  // [num_ids, dim]
    const void* __restrict__ ids,       // [num_ids], of 64 bits if they are wide, else of 32
    T* __restrict__ grad_table,         // [vocab, dim]
    int num_ids, long long vocab, long long dim, long long padding_idx, bool wide) {
    // One block owns ROWS * blockDim.y rows of the table and blockDim.x vectors of them, one thread one vector of every
    // blockDim.y-th row. Each warp searches its part of the ids for these rows. The sums of at most FOUND cotangents are
    // added up, so that errors grow less than those of a single sum.
    constexpr int MOST_WARPS = 16, UNROLLED = 4;
    __shared__ int places[MOST_WARPS][FOUND];
    __shared__ unsigned short rows[MOST_WARPS][FOUND];
    __shared__ int counts[MOST_WARPS];
    using C = Compute<T>;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int warps = blockDim.x * blockDim.y / 32, part = (num_ids + 32 * warps - 1) / (32 * warps) * 32;
    const long long first_row = blockIdx.x * (long long)(ROWS * blockDim.y);
    const long long column = (blockIdx.y * (long long)blockDim.x + threadIdx.x) * WIDTH;
    const int end = min((warp + 1) * part, num_ids);
    C sums[ROWS][WIDTH] = {};
    int next = warp * part;
    bool more;
    do {
        int count = 0;
        for (; next < end && count <= FOUND - 32; next += 32) {
            const int at = next + lane;
            long long row = -1;
            if (at < end) row = wide ? ((const long long*)ids)[at] : ((const int*)ids)[at];
            const bool found = row >= first_row && row < first_row + ROWS * blockDim.y && row != padding_idx;
            const unsigned lanes = __ballot_sync(~0u, found);
            if (found) {
                const int place = count + __popc(lanes & ((1u << lane) - 1));
                places[warp][place] = at;
                rows[warp][place] = (unsigned short)(row - first_row);
            }
            count += __popc(lanes);
        }
        if (lane == 0) counts[warp] = count;
        more = __syncthreads_or(next < end);
        if (column < dim) {
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const int row = i * blockDim.y + threadIdx.y;
                for (int from = 0; from < warps; from++) {
                    C parts[WIDTH] = {};
                    for (int first = 0; first < counts[from]; first += UNROLLED) {
                        C terms[UNROLLED][WIDTH] = {};
#pragma unroll
                        for (int j = 0; j < UNROLLED; j++) {
                            if (first + j < counts[from] && rows[from][first + j] == row) {
                                const T* at = grad_output + places[from][first + j] * dim + column;
                                Vector<T, WIDTH>::load(at).unpack(terms[j]);
                            }
                        }
#pragma unroll
                        for (int j = 0; j < UNROLLED; j++)
#pragma unroll
                            for (int k = 0; k < WIDTH; k++) parts[k] += terms[j][k];
                    }
#pragma unroll
                    for (int k = 0; k < WIDTH; k++) sums[i][k] += parts[k];
                }
            }
        }
        __syncthreads();
    } while (more);
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
