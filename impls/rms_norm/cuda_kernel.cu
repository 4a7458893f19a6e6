#include "rows.cuh"

// The sum over the threads of a row. Short rows may share a warp: a power of two of lanes each.
template <bool SHORT, class C> __device__ C row_sum(C value, int turn) {
    if constexpr (!SHORT) return sum_over_row(Sums<C>{value, C(0)}, turn).first;
    for (int lanes = blockDim.x / 2; lanes; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
    return value;
}
template <class C> __device__ C row_sum(C value, int turn) {
    return blockDim.x > 32 ? row_sum<false>(value, turn) : row_sum<true>(value, turn);
}

// Vectors of a row that a thread keeps in registers forward.
constexpr int KEPT = 4;

template <class T, int WIDTH>
__global__ void __launch_bounds__(512) rms_norm_forward_kernel(
    const T* __restrict__ x,           // [outer, inner, cols], strided
    const T* __restrict__ weight,      // [cols], strided
    T* __restrict__ output,            // [outer * inner, cols]
    Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    long long num_rows, long long cols, long long inner, long long outer_stride, long long inner_stride,
    long long column_stride, long long weight_stride, double eps) {
    // One block owns blockDim.y consecutive rows, one thread every blockDim.x-th vector of one of them. The first KEPT
    // of these stay in registers, those of longer rows are read twice.
    using C = Compute<T>;
    const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    // A row past the end has no columns: its lanes take part in sums of their warp.
    if (row >= num_rows) cols = 0;
    else x += row_offset(row, inner, outer_stride, inner_stride);
    output += row * cols;
    const long long first = threadIdx.x * WIDTH, step = blockDim.x * WIDTH;
    Vector<T, WIDTH> kept[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (first + k * step < cols) kept[k] = take<WIDTH>(x, first + k * step, column_stride);
    C squares = 0;
    auto add = [&](const Vector<T, WIDTH>& vector) {
        C numbers[WIDTH];
        vector.unpack(numbers);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) squares += numbers[j] * numbers[j];
    };
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (first + k * step < cols) add(kept[k]);
    for (long long at = first + KEPT * step; at < cols; at += step) add(take<WIDTH>(x, at, column_stride));
    const C rstd = rsqrt(row_sum(squares, 0) / C(cols) + C(eps));
    if (threadIdx.x == 0 && row < num_rows) rstd_of[row] = rstd;

    auto store = [&](Vector<T, WIDTH> vector, long long at) {
        C numbers[WIDTH], w[WIDTH];
        vector.unpack(numbers);
        take<WIDTH>(weight, at, weight_stride).unpack(w);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) vector.at[j] = T(numbers[j] * rstd * w[j]);
        vector.store(output + at);
    };
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (first + k * step < cols) store(kept[k], first + k * step);
    for (long long at = first + KEPT * step; at < cols; at += step) store(take<WIDTH>(x, at, column_stride), at);
}

// The sums of weight's gradient over the columns of a thread: in registers, or in shared memory where a row leaves none.
template <class C, int NUMBERS, bool SHARED> struct ColumnSums {
    C own[SHARED ? 1 : NUMBERS] = {};

    __device__ C& at(int i) {
        if constexpr (SHARED) {
            extern __shared__ __align__(16) unsigned char memory[];
            return reinterpret_cast<C*>(memory)[i * blockDim.x + threadIdx.x];
        } else {
            return own[i];
        }
    }
};

// Threads of a block of several rows, each of which has a power of two of lanes of one warp.
constexpr int TOGETHER = 256;

// How backward walks through rows: a block has one at a time, or several short ones, or a long one, whose sums lie in
// shared memory.
enum Rows { ONE, SEVERAL, LONG };

// A vector of a row, as its numbers where registers are left for them.
template <class T, int WIDTH, bool AS_NUMBERS> struct Kept {
    Vector<T, AS_NUMBERS ? 1 : WIDTH> vector;
    Compute<T> numbers[AS_NUMBERS ? WIDTH : 1];

    __device__ void keep(const Vector<T, WIDTH>& from) {
        if constexpr (AS_NUMBERS) from.unpack(numbers);
        else vector = from;
    }
    __device__ void unpack(Compute<T> (&to)[WIDTH]) const {
        if constexpr (AS_NUMBERS) {
#pragma unroll
            for (int j = 0; j < WIDTH; j++) to[j] = numbers[j];
        } else {
            vector.unpack(to);
        }
    }
};

template <class T, int VECTORS, Rows ROWS>
__global__ void __launch_bounds__(512) rms_norm_backward_kernel(
    const T* __restrict__ grad_output,       // [outer, inner, cols], vectors aligned to 16 bytes
    const T* __restrict__ x,                 // [outer, inner, cols], vectors aligned to 16 bytes
    const T* __restrict__ weight,            // [cols]
    const Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    T* __restrict__ grad_x,                  // [outer * inner, cols], or null where not needed
    Compute<T>* __restrict__ partial,        // [blocks, cols], or null: the sums over a block's rows
    long long num_rows, long long cols, long long inner, long long grad_outer_stride, long long grad_inner_stride,
    long long x_outer_stride, long long x_inner_stride) {
    // One block owns blockDim.y rows in every gridDim.x * blockDim.y, and each thread the same VECTORS of one of them.
    using C = Compute<T>;
    constexpr int WIDTH = IN_16_BYTES<T>;
    // Whether registers are left for the next row, which is then on its way while one is summed.
    constexpr bool AHEAD = VECTORS <= 4;
    const int step = blockDim.x * WIDTH, first = threadIdx.x * WIDTH, end = cols;
    const long long rows_apart = gridDim.x * (long long)blockDim.y;
    ColumnSums<C, VECTORS * WIDTH, ROWS == LONG> sums;
#pragma unroll
    for (int i = 0; i < VECTORS * WIDTH; i++) sums.at(i) = 0;
    Vector<T, WIDTH> next_x[VECTORS], next_grad[VECTORS];
    Kept<T, WIDTH, ROWS == ONE> this_x[VECTORS], this_grad[VECTORS];
    auto load = [&](long long row) {
        if (row >= num_rows) return;
        const T* x_row = x + row_offset(row, inner, x_outer_stride, x_inner_stride);
        const T* grad_row = grad_output + row_offset(row, inner, grad_outer_stride, grad_inner_stride);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (first + k * step >= end) continue;
            next_x[k] = Vector<T, WIDTH>::load(x_row + first + k * step);
            next_grad[k] = Vector<T, WIDTH>::load(grad_row + first + k * step);
        }
    };
    long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    if (AHEAD) load(row);
    int turn = 0;
    // The rows of a warp begin their turns together, as they share its sums. One past the end has no columns.
    for (long long begin = row - threadIdx.y; begin < num_rows; begin += rows_apart, row += rows_apart, turn ^= 1) {
        const bool there = ROWS != SEVERAL || row < num_rows;
        const int own_end = there ? end : 0;
        const C rstd = there ? rstd_of[row] : C(0);
        C product = 0;
        if (!AHEAD) load(row);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (ROWS == ONE && first + k * step >= end) continue;
            this_x[k].keep(next_x[k]);
            this_grad[k].keep(next_grad[k]);
        }
        if (AHEAD) load(row + rows_apart);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (first + k * step >= own_end) continue;
            C numbers[WIDTH], grads[WIDTH], w[WIDTH];
            this_x[k].unpack(numbers);
            this_grad[k].unpack(grads);
            Vector<T, WIDTH>::load(weight + first + k * step).unpack(w);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const C normal = numbers[j] * rstd;
                product += grads[j] * w[j] * normal;
                sums.at(k * WIDTH + j) += grads[j] * normal;
            }
        }
        if (!grad_x) continue;
        product = row_sum<ROWS == SEVERAL>(product, turn) / C(cols);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (first + k * step >= own_end) continue;
            C numbers[WIDTH], grads[WIDTH], w[WIDTH];
            this_x[k].unpack(numbers);
            this_grad[k].unpack(grads);
            Vector<T, WIDTH>::load(weight + first + k * step).unpack(w);
            Vector<T, WIDTH> grad;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) grad.at[j] = T((grads[j] * w[j] - numbers[j] * rstd * product) * rstd);
            grad.store(grad_x + row * cols + first + k * step);
        }
    }
    if (!partial) return;
    partial += blockIdx.x * cols;
    if constexpr (ROWS != SEVERAL) {
#pragma unroll
        for (int i = 0; i < VECTORS * WIDTH; i++) {
            const int column = first + i / WIDTH * step + i % WIDTH;
            if (column < end) partial[column] = sums.at(i);
        }
    } else {
        // The sums of the rows of a warp are added up, and then those of the warps.
        __shared__ C of_warps[TOGETHER / 32][32 * VECTORS * WIDTH];
        const int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
        for (int i = 0; i < VECTORS * WIDTH; i++) {
            C sum = sums.at(i);
            for (int lanes = blockDim.x; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
            const int column = first + i / WIDTH * step + i % WIDTH;
            if (thread % 32 < blockDim.x && column < end) of_warps[thread / 32][column] = sum;
        }
        __syncthreads();
        for (int column = thread; column < end; column += TOGETHER) {
            C sum = 0;
#pragma unroll
            for (int warp = 0; warp < TOGETHER / 32; warp++) sum += of_warps[warp][column];
            partial[column] = sum;
        }
    }
}

template <class T>
__global__ void __launch_bounds__(512) rms_norm_backward_products_kernel(
    const T* __restrict__ grad_output,       // [outer, inner, cols], strided
    const T* __restrict__ x,                 // [outer, inner, cols], strided
    const T* __restrict__ weight,            // [cols], strided
    const Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    Compute<T>* __restrict__ products,       // [outer * inner]: row means of grad_normal * normal
    long long num_rows, long long cols, long long inner, long long grad_outer_stride, long long grad_inner_stride,
    long long grad_column_stride, long long x_outer_stride, long long x_inner_stride, long long x_column_stride,
    long long weight_stride) {
    // One block owns blockDim.y consecutive rows, one thread every blockDim.x-th column of one of them.
    using C = Compute<T>;
    const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    const C rstd = row < num_rows ? rstd_of[row] : C(0);
    if (row >= num_rows) {
        cols = 0;  // its lanes take part in sums of their warp
    } else {
        x += row_offset(row, inner, x_outer_stride, x_inner_stride);
        grad_output += row_offset(row, inner, grad_outer_stride, grad_inner_stride);
    }
    C product = 0;
#pragma unroll 4
    for (long long at = threadIdx.x; at < cols; at += blockDim.x)
        product += C(grad_output[at * grad_column_stride]) * C(weight[at * weight_stride]) *
                   (C(x[at * x_column_stride]) * rstd);
    product = row_sum(product, 0);
    if (threadIdx.x == 0 && row < num_rows) products[row] = product / C(cols);
}

template <class T>
__global__ void __launch_bounds__(128) rms_norm_backward_columns_kernel(
    const T* __restrict__ grad_output,        // [outer, inner, cols], strided
    const T* __restrict__ x,                  // [outer, inner, cols], strided
    const T* __restrict__ weight,             // [cols], strided
    const Compute<T>* __restrict__ rstd_of,   // [outer * inner]
    const Compute<T>* __restrict__ products,  // [outer * inner]
    T* __restrict__ grad_x,                   // [outer * inner, cols], or null where not needed
    Compute<T>* __restrict__ partial,         // [gridDim.y, cols], or null: the sums over a block's rows
    long long num_rows, long long cols, long long inner, long long grad_outer_stride, long long grad_inner_stride,
    long long grad_column_stride, long long x_outer_stride, long long x_inner_stride, long long x_column_stride,
    long long weight_stride) {
    // One block owns blockDim.x columns of every gridDim.y-th row, one thread one of these columns.
    using C = Compute<T>;
    const long long column = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (column >= cols) return;
    const C w = C(weight[column * weight_stride]);
    x += column * x_column_stride;
    grad_output += column * grad_column_stride;
    C sum = 0;
#pragma unroll 4
    for (long long row = blockIdx.y; row < num_rows; row += gridDim.y) {
        const C rstd = rstd_of[row], normal = C(x[row_offset(row, inner, x_outer_stride, x_inner_stride)]) * rstd;
        const C grad = C(grad_output[row_offset(row, inner, grad_outer_stride, grad_inner_stride)]);
        sum += grad * normal;
        if (grad_x) grad_x[row * cols + column] = T((grad * w - normal * products[row]) * rstd);
    }
    if (partial) partial[blockIdx.y * cols + column] = sum;
}

template <class T>
__global__ void __launch_bounds__(1024) rms_norm_sum_partials_kernel(
    const Compute<T>* __restrict__ partial,  // [partials, cols]
    T* __restrict__ grad_weight,             // [cols]
    long long partials, long long cols) {
    // One block owns 32 columns, one thread every blockDim.y-th partial sum of one of them.
    using C = Compute<T>;
    __shared__ C of_threads[32][32];
    const long long column = blockIdx.x * 32ll + threadIdx.x;
    C sum = 0;
    if (column < cols) {
#pragma unroll 4
        for (long long i = threadIdx.y; i < partials; i += blockDim.y) sum += partial[i * cols + column];
    }
    of_threads[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= cols) return;
    for (int i = 1; i < blockDim.y; i++) sum += of_threads[i][threadIdx.x];
    grad_weight[column] = T(sum);
}
