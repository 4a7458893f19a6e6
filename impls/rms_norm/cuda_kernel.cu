#include "rows.cuh"
#include "shifted.cuh"
#include "staged.cuh"

// The sum over the threads of a row. Short rows may share a warp: a power of two of lanes each.
template <bool SHORT, class C> __device__ C row_sum(C value, int turn) {
    if constexpr (!SHORT) return sum_over_row(Sums<C>{value, C(0)}, turn).first;
    for (int lanes = blockDim.x / 2; lanes; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
    return value;
}
template <class C> __device__ C row_sum(C value, int turn) {
    return blockDim.x > 32 ? row_sum<false>(value, turn) : row_sum<true>(value, turn);
}

// Vectors of a row that a thread keeps in registers forward. Where they are shifted into place, a warp's exchanges and the
// ends of the row are then fewer.
template <bool SHIFTED> constexpr int VECTORS_KEPT = SHIFTED ? 8 : 4;

// A residual that is added to x before it is normalized, and where the sums go. Nothing is added with ADDED = false.
template <class T, bool ADDED> struct Residual {};
template <class T> struct Residual<T, true> {
    const T* __restrict__ residual;  // [outer, inner, cols], strided
    T* __restrict__ sums;            // [outer * inner, cols]
    long long outer_stride, inner_stride, column_stride;
};

// x plus the residual, rounded once: what is normalized is what is returned.
template <class T, int WIDTH> __device__ void add_to(Vector<T, WIDTH>& x, const Vector<T, WIDTH>& residual) {
    Compute<T> numbers[WIDTH], others[WIDTH];
    x.unpack(numbers);
    residual.unpack(others);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) x.at[j] = T(numbers[j] + others[j]);
}

// With SHIFTED, rows may begin between two multiples of 16 bytes, and a row has whole warps.
template <class T, int WIDTH, bool SHIFTED, bool ADDED>
__device__ __forceinline__ void normalize_rows(
    const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ output, Compute<T>* __restrict__ rstd_of,
    long long num_rows, long long cols, long long inner, long long outer_stride, long long inner_stride,
    long long column_stride, long long weight_stride, double eps, Residual<T, ADDED> added) {
    // One block owns blockDim.y consecutive rows, one thread every blockDim.x-th vector of one of them. The last KEPT
    // of these stay in registers, those of longer rows are read twice.
    using C = Compute<T>;
    const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    if (SHIFTED && row >= num_rows) return;
    // A row past the end has no columns: its lanes take part in sums of their warp.
    if (row >= num_rows) cols = 0;
    else x += row_offset(row, inner, outer_stride, inner_stride);
    output += row * cols;
    if constexpr (ADDED) {
        if (row < num_rows) added.residual += row_offset(row, inner, added.outer_stride, added.inner_stride);
        added.sums += row * cols;
    }
    constexpr int KEPT = VECTORS_KEPT<SHIFTED>;
    const long long first = threadIdx.x * WIDTH, step = blockDim.x * WIDTH, piece = KEPT * step;
    Vector<T, WIDTH> data[KEPT];
    auto load = [&](long long start, bool store_sums) {
        if constexpr (SHIFTED) {
            auto number = [&](int k) { return int((start + first) / WIDTH) + k * int(blockDim.x); };
            load_shifted(data, x, cols, number, 0.0f);
            if constexpr (ADDED) {
                Vector<T, WIDTH> others[KEPT];
                load_shifted(others, added.residual, cols, number, 0.0f);
#pragma unroll
                for (int k = 0; k < KEPT; k++) {
                    add_to(data[k], others[k]);
                    // The lanes of a warp store their vectors together, so that those without a vector take part.
                    if (!store_sums || (number(k) - int(threadIdx.x % 32)) * (long long)WIDTH >= cols) continue;
                    store_shifted(added.sums, cols, number(k), data[k]);
                }
            }
        } else {
#pragma unroll
            for (int k = 0; k < KEPT; k++)
                if (start + first + k * step < cols) data[k] = take<WIDTH>(x, start + first + k * step, column_stride);
            if constexpr (ADDED) {
#pragma unroll
                for (int k = 0; k < KEPT; k++) {
                    const long long at = start + first + k * step;
                    if (at >= cols) continue;
                    add_to(data[k], take<WIDTH>(added.residual, at, added.column_stride));
                    if (store_sums) data[k].store(added.sums + at);
                }
            }
        }
    };
    C squares = 0;
    long long last = 0;
    for (long long start = 0; start < cols; start += piece) {
        last = start;
        load(start, true);
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            if (start + first + k * step >= cols) continue;
            C numbers[WIDTH];
            data[k].unpack(numbers);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) squares += numbers[j] * numbers[j];
        }
    }
    const C rstd = rsqrt(row_sum(squares, 0) / C(cols) + C(eps));
    if (threadIdx.x == 0 && row < num_rows) rstd_of[row] = rstd;

    auto scale = [&](Vector<T, WIDTH>& vector, const Vector<T, WIDTH>& of_weight) {
        C numbers[WIDTH], w[WIDTH];
        vector.unpack(numbers);
        of_weight.unpack(w);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) vector.at[j] = T(numbers[j] * rstd * w[j]);
    };
    // Walk backwards, because the last piece is still in registers and the pieces before it are in a cache.
    for (long long start = last; start >= 0; start -= piece) {
        if (start < last) load(start, false);
        if constexpr (SHIFTED) {
            constexpr int AT_ONCE = 2;  // more would take more registers than there are
#pragma unroll
            for (int from = 0; from < KEPT; from += AT_ONCE) {
                Vector<T, WIDTH> w[AT_ONCE];
                auto number = [&](int k) { return int((start + first) / WIDTH) + (from + k) * int(blockDim.x); };
                // The lanes of a warp store their vectors together, so that those without a vector take part.
                auto of_warp = [&](int k) { return (number(k) - int(threadIdx.x % 32)) * (long long)WIDTH; };
                if (of_warp(0) >= cols) continue;
                load_shifted(w, weight, cols, number, 0.0f);
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    if (of_warp(k) >= cols) continue;
                    scale(data[from + k], w[k]);
                    store_shifted(output, cols, number(k), data[from + k]);
                }
            }
        } else {
#pragma unroll
            for (int k = 0; k < KEPT; k++) {
                const long long at = start + first + k * step;
                if (at >= cols) continue;
                scale(data[k], take<WIDTH>(weight, at, weight_stride));
                data[k].store(output + at);
            }
        }
    }
}

template <class T, int WIDTH, bool SHIFTED = false>
__global__ void __launch_bounds__(512) rms_norm_forward_kernel(
    const T* __restrict__ x,           // [outer, inner, cols], strided
    const T* __restrict__ weight,      // [cols], strided
    T* __restrict__ output,            // [outer * inner, cols]
    Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    long long num_rows, long long cols, long long inner, long long outer_stride, long long inner_stride,
    long long column_stride, long long weight_stride, double eps) {
    // One block owns blockDim.y consecutive rows.
    normalize_rows<T, WIDTH, SHIFTED, false>(
        x, weight, output, rstd_of, num_rows, cols, inner, outer_stride, inner_stride, column_stride, weight_stride,
        eps, {});
}

template <class T, int WIDTH, bool SHIFTED = false>
__global__ void __launch_bounds__(512) add_rms_norm_forward_kernel(
    const T* __restrict__ x,           // [outer, inner, cols], strided
    const T* __restrict__ weight,      // [cols], strided
    T* __restrict__ output,            // [outer * inner, cols]
    Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    const T* __restrict__ residual,    // [outer, inner, cols], strided
    T* __restrict__ sums,              // [outer * inner, cols]: x + residual
    long long num_rows, long long cols, long long inner, long long outer_stride, long long inner_stride,
    long long column_stride, long long residual_outer_stride, long long residual_inner_stride,
    long long residual_column_stride, long long weight_stride, double eps) {
    // One block owns blockDim.y consecutive rows.
    normalize_rows<T, WIDTH, SHIFTED, true>(
        x, weight, output, rstd_of, num_rows, cols, inner, outer_stride, inner_stride, column_stride, weight_stride,
        eps, {residual, sums, residual_outer_stride, residual_inner_stride, residual_column_stride});
}

// Threads of a block of several rows, each of which has a power of two of lanes of one warp.
constexpr int TOGETHER = 256;

// How backward walks through rows: a block has one at a time, or several short ones.
enum Rows { ONE, SEVERAL };

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

// With SHIFTED, rows may begin between two multiples of 16 bytes. Columns that a row does not have are 0. With ADDED,
// another gradient of x is added to the one through the norm, before their sum is rounded.
template <class T, int WIDTH, int VECTORS, Rows ROWS, bool SHIFTED = false, bool ADDED = false>
__global__ void __launch_bounds__(512) rms_norm_backward_kernel(
    const T* __restrict__ grad_output,       // [outer, inner, cols], vectors of WIDTH columns adjacent
    const T* __restrict__ x,                 // [outer, inner, cols], vectors of WIDTH columns adjacent
    const T* __restrict__ weight,            // [cols]
    const Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    T* __restrict__ grad_x,                  // [outer * inner, cols], or null where not needed
    Compute<T>* __restrict__ partial,        // [blocks, cols], or null: the sums over a block's rows
    long long num_rows, long long cols, long long inner, long long grad_outer_stride, long long grad_inner_stride,
    long long x_outer_stride, long long x_inner_stride,
    const T* __restrict__ added) {  // [outer * inner, cols], or null unless ADDED
    // One block owns blockDim.y rows in every gridDim.x * blockDim.y, and each thread the same VECTORS of one of them.
    using C = Compute<T>;
    // Whether registers are left for the next row, which is then on its way while one is summed.
    constexpr bool AHEAD = !SHIFTED && VECTORS * WIDTH * sizeof(T) <= 64;
    const int step = blockDim.x * WIDTH, first = threadIdx.x * WIDTH, end = cols;
    const long long rows_apart = gridDim.x * (long long)blockDim.y;
    C sums[VECTORS * WIDTH] = {};
    Vector<T, WIDTH> next_x[VECTORS], next_grad[VECTORS];
    Kept<T, WIDTH, ROWS == ONE> this_x[VECTORS], this_grad[VECTORS];
    auto number = [&](int k) { return int(threadIdx.x) + k * int(blockDim.x); };
    Vector<T, WIDTH> weights[VECTORS];
    if constexpr (SHIFTED) load_shifted(weights, weight, cols, number, 0.0f);
    auto weight_of = [&](int k, C (&w)[WIDTH]) {
        if constexpr (SHIFTED) weights[k].unpack(w);
        else Vector<T, WIDTH>::load(weight + first + k * step).unpack(w);
    };
    auto load = [&](long long row) {
        if (row >= num_rows) return;
        const T* x_row = x + row_offset(row, inner, x_outer_stride, x_inner_stride);
        const T* grad_row = grad_output + row_offset(row, inner, grad_outer_stride, grad_inner_stride);
        if constexpr (SHIFTED) {
            load_shifted(next_x, x_row, cols, number, 0.0f);
            load_shifted(next_grad, grad_row, cols, number, 0.0f);
            return;
        }
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
            if (ROWS == ONE && !SHIFTED && first + k * step >= end) continue;
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
            weight_of(k, w);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const C normal = numbers[j] * rstd, of_normal = grads[j] * w[j];
                product += of_normal * normal;
                sums[k * WIDTH + j] += grads[j] * normal;
                // Keep the products, so that they are not computed twice.
                if constexpr (ROWS == ONE) this_x[k].numbers[j] = normal, this_grad[k].numbers[j] = of_normal;
            }
        }
        if (!grad_x) continue;
        product = row_sum<ROWS == SEVERAL>(product, turn) / C(cols);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            // The lanes of a warp store their shifted vectors together, so that those without a vector take part.
            if (first + k * step - (SHIFTED ? int(threadIdx.x % 32) * WIDTH : 0) >= own_end) continue;
            C normals[WIDTH], of_normals[WIDTH];
            this_x[k].unpack(normals);
            this_grad[k].unpack(of_normals);
            if constexpr (ROWS != ONE) {
                C w[WIDTH];
                weight_of(k, w);
#pragma unroll
                for (int j = 0; j < WIDTH; j++) normals[j] *= rstd, of_normals[j] *= w[j];
            }
            Vector<T, WIDTH> grad;
            [[maybe_unused]] C others[WIDTH];
            if constexpr (ADDED && SHIFTED) {
                Vector<T, WIDTH> one[1];
                load_shifted(one, added + row * cols, cols, [&](int) { return number(k); }, 0.0f);
                one[0].unpack(others);
            } else if constexpr (ADDED) {
                Vector<T, WIDTH>::load(added + row * cols + first + k * step).unpack(others);
            }
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const C of_x = (of_normals[j] - normals[j] * product) * rstd;
                if constexpr (ADDED) grad.at[j] = T(of_x + others[j]);
                else grad.at[j] = T(of_x);
            }
            if constexpr (SHIFTED) store_shifted(grad_x + row * cols, cols, number(k), grad);
            else grad.store(grad_x + row * cols + first + k * step);
        }
    }
    if (!partial) return;
    partial += blockIdx.x * cols;
    if constexpr (ROWS != SEVERAL) {
#pragma unroll
        for (int i = 0; i < VECTORS * WIDTH; i++) {
            const int column = first + i / WIDTH * step + i % WIDTH;
            if (column < end) partial[column] = sums[i];
        }
    } else {
        // The sums of the rows of a warp are added up, and then those of the warps.
        __shared__ C of_warps[TOGETHER / 32][32 * VECTORS * WIDTH];
        const int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
        for (int i = 0; i < VECTORS * WIDTH; i++) {
            C sum = sums[i];
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

// One row at a time is normalized of those that a block or a cluster owns: one in as many as there are of these.
template <class T, int VECTORS, bool ADDED>
__device__ __forceinline__ void normalize_staged_rows(
    const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ output, Compute<T>* __restrict__ rstd_of,
    long long num_rows, long long cols, long long inner, long long outer_stride, long long inner_stride, double eps,
    int stages, Residual<T, ADDED> added) {
    using C = Compute<T>;
    constexpr int WIDTH = IN_16_BYTES<T>;
    const int block = block_in_cluster(), blocks = blocks_in_cluster();
    if (blocks > 1) cluster_arrive();
    const long long rows_apart = num_clusters();
    long long row = cluster_id();
    Stages<ADDED ? 2 : 1> staged(stages, Slice(cols / WIDTH, block, blocks));
    const int first = staged.slice.first, count = staged.slice.count;
    auto fill = [&](int stage, long long row) {
        if (threadIdx.x > 0 || row >= num_rows) return;
        const T* x_row = x + row_offset(row, inner, outer_stride, inner_stride);
        if constexpr (ADDED)
            staged.fill(stage, x_row, added.residual + row_offset(row, inner, added.outer_stride, added.inner_stride));
        else staged.fill(stage, x_row);
    };
    for (int i = 0; i < stages; i++) fill(i, row + i * rows_apart);
    Vector<T, WIDTH> weights[VECTORS];
    load_columns(weights, weight, staged.slice);
    if (blocks > 1) cluster_wait();
    int turn = 0;
    for (; row < num_rows; row += rows_apart, turn ^= 1) {
        staged.wait();
        C sum = 0;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int i = threadIdx.x + k * blockDim.x;
            if (i >= count) continue;
            auto data = vector_at<T>(staged.of(staged.present, 0) + i);
            if constexpr (ADDED) {
                add_to(data, vector_at<T>(staged.of(staged.present, 1) + i));
                data.store(added.sums + row * cols + (long long)(first + i) * WIDTH);
                data.store(reinterpret_cast<T*>(staged.of(staged.present, 0) + i));
            }
            C numbers[WIDTH];
            data.unpack(numbers);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) sum += numbers[j] * numbers[j];
        }
        sum = row_sum(sum, turn);
        if (blocks > 1) sum = sum_of_blocks(sum, block, blocks, turn);
        const C rstd = rsqrt(sum / C(cols) + C(eps));
        if (threadIdx.x == 0 && block == 0) rstd_of[row] = rstd;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int i = threadIdx.x + k * blockDim.x;
            if (i >= count) continue;
            auto data = vector_at<T>(staged.of(staged.present, 0) + i);
            C numbers[WIDTH], w[WIDTH];
            data.unpack(numbers);
            weights[k].unpack(w);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) data.at[j] = T(numbers[j] * rstd * w[j]);
            data.store_streaming(output + row * cols + (long long)(first + i) * WIDTH);
        }
        staged.release();
        fill(staged.present, row + stages * rows_apart);
        staged.pass_on();
    }
}

template <class T, int VECTORS>
__global__ void __launch_bounds__(512) rms_norm_forward_staged_kernel(
    const T* __restrict__ x,           // [outer, inner, cols], strided, in whole vectors
    const T* __restrict__ weight,      // [cols]
    T* __restrict__ output,            // [outer * inner, cols]
    Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    long long num_rows, long long cols, long long inner, long long outer_stride, long long inner_stride, double eps,
    int stages) {
    // One block or cluster owns one row in as many as there are blocks or clusters.
    normalize_staged_rows<T, VECTORS, false>(
        x, weight, output, rstd_of, num_rows, cols, inner, outer_stride, inner_stride, eps, stages, {});
}

template <class T, int VECTORS>
__global__ void __launch_bounds__(512) add_rms_norm_forward_staged_kernel(
    const T* __restrict__ x,           // [outer, inner, cols], strided, in whole vectors
    const T* __restrict__ weight,      // [cols]
    T* __restrict__ output,            // [outer * inner, cols]
    Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    const T* __restrict__ residual,    // [outer, inner, cols], strided, in whole vectors
    T* __restrict__ sums,              // [outer * inner, cols]: x + residual
    long long num_rows, long long cols, long long inner, long long outer_stride, long long inner_stride,
    long long residual_outer_stride, long long residual_inner_stride, double eps, int stages) {
    // One block or cluster owns one row in as many as there are blocks or clusters.
    normalize_staged_rows<T, VECTORS, true>(
        x, weight, output, rstd_of, num_rows, cols, inner, outer_stride, inner_stride, eps, stages,
        {residual, sums, residual_outer_stride, residual_inner_stride, 1});
}

template <class T, int VECTORS, bool ADDED = false>
__global__ void __launch_bounds__(512) rms_norm_backward_staged_kernel(
    const T* __restrict__ grad_output,       // [outer, inner, cols], strided, in whole vectors
    const T* __restrict__ x,                 // [outer, inner, cols], strided, in whole vectors
    const T* __restrict__ weight,            // [cols]
    const Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    T* __restrict__ grad_x,                  // [outer * inner, cols], or null where not needed
    Compute<T>* __restrict__ partial,        // [clusters, cols], or null: the sums over a cluster's rows
    long long num_rows, long long cols, long long inner, long long grad_outer_stride, long long grad_inner_stride,
    long long x_outer_stride, long long x_inner_stride,
    const T* __restrict__ added,  // [outer * inner, cols], or null unless ADDED
    int stages) {
    // One block or cluster owns one row in as many as there are blocks or clusters.
    using C = Compute<T>;
    constexpr int WIDTH = IN_16_BYTES<T>;
    const int block = block_in_cluster(), blocks = blocks_in_cluster();
    if (blocks > 1) cluster_arrive();
    const long long rows_apart = num_clusters();
    long long row = cluster_id();
    Stages<ADDED ? 3 : 2> staged(stages, Slice(cols / WIDTH, block, blocks));
    const int first = staged.slice.first, count = staged.slice.count;
    auto fill = [&](int stage, long long row) {
        if (threadIdx.x > 0 || row >= num_rows) return;
        const T* x_row = x + row_offset(row, inner, x_outer_stride, x_inner_stride);
        const T* grad_row = grad_output + row_offset(row, inner, grad_outer_stride, grad_inner_stride);
        if constexpr (ADDED) staged.fill(stage, x_row, grad_row, added + row * cols);
        else staged.fill(stage, x_row, grad_row);
    };
    for (int i = 0; i < stages; i++) fill(i, row + i * rows_apart);
    Vector<T, WIDTH> weights[VECTORS];
    C sums[VECTORS][WIDTH] = {};
    load_columns(weights, weight, staged.slice);
    C next_rstd = row < num_rows ? rstd_of[row] : C(0);
    if (blocks > 1) cluster_wait();
    int turn = 0;
    for (; row < num_rows; row += rows_apart, turn ^= 1) {
        const C rstd = next_rstd;
        if (row + rows_apart < num_rows) next_rstd = rstd_of[row + rows_apart];
        staged.wait();
        C product = 0;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int i = threadIdx.x + k * blockDim.x;
            if (i >= count) continue;
            C numbers[WIDTH], grads[WIDTH], w[WIDTH];
            vector_at<T>(staged.of(staged.present, 0) + i).unpack(numbers);
            vector_at<T>(staged.of(staged.present, 1) + i).unpack(grads);
            weights[k].unpack(w);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const C normal = numbers[j] * rstd;
                product += grads[j] * w[j] * normal;
                sums[k][j] += grads[j] * normal;
            }
        }
        if (grad_x) {
            product = row_sum(product, turn);
            if (blocks > 1) product = sum_of_blocks(product, block, blocks, turn);
            product /= C(cols);
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                const int i = threadIdx.x + k * blockDim.x;
                if (i >= count) continue;
                C numbers[WIDTH], grads[WIDTH], w[WIDTH];
                vector_at<T>(staged.of(staged.present, 0) + i).unpack(numbers);
                vector_at<T>(staged.of(staged.present, 1) + i).unpack(grads);
                weights[k].unpack(w);
                [[maybe_unused]] C others[WIDTH];
                if constexpr (ADDED) vector_at<T>(staged.of(staged.present, 2) + i).unpack(others);
                Vector<T, WIDTH> grad;
#pragma unroll
                for (int j = 0; j < WIDTH; j++) {
                    const C of_x = (grads[j] * w[j] - numbers[j] * rstd * product) * rstd;
                    if constexpr (ADDED) grad.at[j] = T(of_x + others[j]);
                    else grad.at[j] = T(of_x);
                }
                grad.store_streaming(grad_x + row * cols + (long long)(first + i) * WIDTH);
            }
        }
        staged.release();
        fill(staged.present, row + stages * rows_apart);
        staged.pass_on();
    }
    if (!partial) return;
    partial += cluster_id() * cols + (long long)first * WIDTH;
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i >= count) continue;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) partial[(long long)i * WIDTH + j] = sums[k][j];
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

template <class T, bool ADDED = false>
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
    long long weight_stride, const T* __restrict__ added) {  // [outer * inner, cols], or null unless ADDED
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
        if (!grad_x) continue;
        C of_x = (grad * w - normal * products[row]) * rstd;
        if constexpr (ADDED) of_x += C(added[row * cols + column]);
        grad_x[row * cols + column] = T(of_x);
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
