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
