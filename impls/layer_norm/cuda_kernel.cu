#include "rows.cuh"
#include "shifted.cuh"
#include "staged.cuh"

// A product that is rounded by itself. Fused with the subtraction of its mean, it would leave its rounding error where
// all products of a row are equal, and the gradient is 0.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// With SHIFTED, rows may begin between two multiples of 16 bytes. The same threads own the same columns.
template <class T, int WIDTH, int VECTORS, bool STRIDED = false, bool SHIFTED = false>
__global__ void __launch_bounds__(512) layer_norm_forward_kernel(
    const T* __restrict__ x,           // [outer, inner, cols], strided
    const T* __restrict__ weight,      // [cols], strided
    const T* __restrict__ bias,        // [cols], strided
    T* __restrict__ output,            // [outer * inner, cols]
    Compute<T>* __restrict__ mean_of,  // [outer * inner]
    Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    long long num_rows, long long cols, long long inner, long long outer_stride, long long inner_stride,
    long long column_stride, long long weight_stride, long long bias_stride, double eps) {
    // One block owns blockDim.y consecutive rows, one thread VECTORS vectors of each piece of a row (mostly one).
    using C = Compute<T>;
    const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    const bool present = row < num_rows;
    // A row past the end has no columns: its lanes take part in sums of their warp.
    if (!present) cols = 0;
    else x += row_offset(row, inner, outer_stride, inner_stride);
    output += row * cols;
    const int step = blockDim.x * WIDTH;
    const long long first = threadIdx.x * WIDTH, piece = (long long)step * VECTORS;
    // A 64-bit division takes as long as several elements.
    const long long last = cols <= piece ? 0 : (cols - 1) / piece * piece;
    Vector<T, WIDTH> data[VECTORS];
    // So do several 64-bit comparisons, so compare within a piece in 32 bits.
    auto exists = [&](long long start, int k) {
        if constexpr (WIDTH > 1) return start + first + k * step < cols;
        else return int(first) + k * step < (start < last ? int(piece) : int(cols - start));
    };
    auto load = [&](long long start) {
        if constexpr (SHIFTED) {
            auto number = [&](int k) { return int((start + first) / WIDTH) + k * int(blockDim.x); };
            load_shifted(data, x, cols, number, 0.0f);
        } else {
#pragma unroll
            for (int k = 0; k < VECTORS; k++)
                if (exists(start, k)) data[k] = take<WIDTH, STRIDED>(x, start + first + k * step, column_stride);
        }
    };

    C mean = 0, squares = 0;
    for (long long start = 0; start == 0 || start < cols; start += piece) {
        load(start);
        Sums<C> sum{0, 0};
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (!exists(start, k)) continue;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) sum.first += C(data[k].at[j]);
        }
        const C num = C(start < last ? piece : cols - last);
        const C piece_mean = sum_over_row(sum, 0).first / num;
        sum = {0, 0};
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (!exists(start, k)) continue;
            const int own = SHIFTED ? int(min(cols - (start + first + k * step), (long long)WIDTH)) : WIDTH;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const C centred = C(data[k].at[j]) - piece_mean;
                if (j < own) sum.first += centred * centred;
            }
        }
        // Merge the squared deviations of two samples: Chan, Golub, LeVeque 1983, (2.1).
        const C share = num / (C(start) + num), apart = piece_mean - mean;
        mean += apart * share;
        // Keep this order of factors: before the first piece, apart is the piece's mean, whose square may overflow.
        squares += sum_over_row(sum, 1).first + C(start) * apart * (apart * share);
    }
    const C rstd = rsqrt(squares / C(cols) + C(eps));
    if (threadIdx.x == 0 && present) {
        mean_of[row] = mean;
        rstd_of[row] = rstd;
    }

    // Walk backwards, because the last piece is still in registers and the pieces before it are in a cache.
    for (long long start = last; start >= 0; start -= piece) {
        if (start < last) load(start);
        auto normalize = [&](int k, const Vector<T, WIDTH>& w, const Vector<T, WIDTH>& b) {
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                data[k].at[j] = T((C(data[k].at[j]) - mean) * rstd * C(w.at[j]) + C(b.at[j]));
        };
        if constexpr (SHIFTED) {
            constexpr int AT_ONCE = 2;  // more would take more registers than there are
#pragma unroll
            for (int from = 0; from < VECTORS; from += AT_ONCE) {
                Vector<T, WIDTH> w[AT_ONCE], b[AT_ONCE];
                auto number = [&](int k) { return int((start + first) / WIDTH) + (from + k) * int(blockDim.x); };
                // The lanes of a warp store their vectors together, so that those without a vector take part.
                if ((number(0) - int(threadIdx.x % 32)) * (long long)WIDTH >= cols) continue;
                load_shifted(w, weight, cols, number, 0.0f);
                load_shifted(b, bias, cols, number, 0.0f);
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    if ((number(k) - int(threadIdx.x % 32)) * (long long)WIDTH >= cols) continue;
                    normalize(from + k, w[k], b[k]);
                    store_shifted(output, cols, number(k), data[from + k]);
                }
            }
        } else {
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                if (!exists(start, k)) continue;
                const long long column = start + first + k * step;
                normalize(k, take<WIDTH, STRIDED>(weight, column, weight_stride),
                          take<WIDTH, STRIDED>(bias, column, bias_stride));
                data[k].store(output + column);
            }
        }
    }
}

// The sums of weight's and bias's gradients over the columns that a thread owns, in registers or in shared memory.
// There each thread has its own 16 bytes in every 16 * blockDim.x. With WIDTH 1 they are always in registers.
template <class C, int WIDTH, int VECTORS, bool SHARED> struct Accumulators {
    static constexpr int TOGETHER = WIDTH == 1 ? 1 : IN_16_BYTES<C>, PER_VECTOR = 2 * WIDTH / TOGETHER;
    using Part = Vector<C, TOGETHER>;
    Part own[SHARED ? 1 : VECTORS * PER_VECTOR];

    __device__ static Part* shared() {
        extern __shared__ __align__(16) unsigned char memory[];
        return reinterpret_cast<Part*>(memory) + threadIdx.x;
    }
    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < VECTORS * PER_VECTOR; i++) put(i, {});
    }
    __device__ Part get(int i) const {
        if constexpr (SHARED) return shared()[i * blockDim.x];
        else return own[i];
    }
    __device__ void put(int i, Part value) {
        if constexpr (SHARED) shared()[i * blockDim.x] = value;
        else own[i] = value;
    }
    // Adds to the sums of vector k.
    __device__ void add(int k, const C (&to_weight)[WIDTH], const C (&to_bias)[WIDTH]) {
#pragma unroll
        for (int i = 0; i < PER_VECTOR; i++) {
            Part sum = get(k * PER_VECTOR + i);
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                const int at = i % (PER_VECTOR / 2) * TOGETHER + j;
                sum.at[j] += i < PER_VECTOR / 2 ? to_weight[at] : to_bias[at];
            }
            put(k * PER_VECTOR + i, sum);
        }
    }
    __device__ void store(int k, C* weight, C* bias) const {
#pragma unroll
        for (int i = 0; i < PER_VECTOR; i++)
            get(k * PER_VECTOR + i).store((i < PER_VECTOR / 2 ? weight : bias) + i % (PER_VECTOR / 2) * TOGETHER);
    }
    // Stores the sums of the first `present` columns of vector k, one by one.
    __device__ void store_some(int k, C* weight, C* bias, int present) const {
#pragma unroll
        for (int i = 0; i < PER_VECTOR; i++) {
            const Part sum = get(k * PER_VECTOR + i);
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                const int at = i % (PER_VECTOR / 2) * TOGETHER + j;
                if (at < present) (i < PER_VECTOR / 2 ? weight : bias)[at] = sum.at[j];
            }
        }
    }
};

// A vector before it is split into elements. Half types would else be split as soon as they arrive, so the thread would
// wait for them.
template <class T, int WIDTH> struct WordsOf { using type = uint4; };
template <class T> struct WordsOf<T, 1> { using type = T; };
template <class T, int WIDTH> using Words = typename WordsOf<T, WIDTH>::type;

template <class T, int WIDTH> __device__ void unpack(const Words<T, WIDTH>& words, Compute<T> (&numbers)[WIDTH]) {
    Vector<T, WIDTH> vector;
    memcpy(&vector, &words, sizeof words);
    vector.unpack(numbers);
}

// Whether 80 registers suffice for a thread of backward. Else it needs 128.
template <class T, int VECTORS, bool MORE> constexpr bool FEW = !MORE && VECTORS == 2 && sizeof(T) > 2;

// With SHIFTED, rows may begin between two multiples of 16 bytes. Columns that a row does not have are 0.
template <class T, int WIDTH, int VECTORS, bool SHARED, bool SHIFTED = false>
__global__ void __launch_bounds__(
    FEW<T, VECTORS, SHARED || SHIFTED> ? 256 : 512, FEW<T, VECTORS, SHARED || SHIFTED> ? 3 : 1)
layer_norm_backward_kernel(
    const T* __restrict__ grad_output,       // [outer, inner, cols], vectors of WIDTH columns adjacent
    const T* __restrict__ x,                 // [outer, inner, cols], vectors of WIDTH columns adjacent
    const T* __restrict__ weight,            // [cols]
    const Compute<T>* __restrict__ mean_of,  // [outer * inner]
    const Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    T* __restrict__ grad_x,                  // [outer * inner, cols], or null where not needed
    Compute<T>* __restrict__ partial,        // [2, blocks, cols], or null: the sums over a block's rows
    long long num_rows, long long cols, long long inner, long long grad_outer_stride, long long grad_inner_stride,
    long long x_outer_stride, long long x_inner_stride) {
    // One block owns every gridDim.x-th row, and each thread the same VECTORS vectors of all of them.
    using C = Compute<T>;
    const int step = blockDim.x * WIDTH, first = threadIdx.x * WIDTH, end = cols;
    Accumulators<C, WIDTH, VECTORS, SHARED> accumulators;
    if (partial) accumulators.clear();
    // Load the next row while this one is summed. If registers are few, load it only after this row's sums, and where
    // vectors are shifted only when its turn has come.
    constexpr bool EARLY = !SHIFTED && VECTORS * WIDTH * sizeof(T) <= 64;
    static_assert(!SHARED || !SHIFTED, "both would take the same shared memory");
    const C reciprocal = C(1) / C(cols);
    Words<T, WIDTH> xs[VECTORS], grads[VECTORS], next_xs[VECTORS], next_grads[VECTORS];
    const T *x_row, *grad_row;
    auto seek = [&](long long row) {
        x_row = x + row_offset(row, inner, x_outer_stride, x_inner_stride);
        grad_row = grad_output + row_offset(row, inner, grad_outer_stride, grad_inner_stride);
    };
    auto number = [&](int k) { return int(threadIdx.x) + k * int(blockDim.x); };
    Vector<T, WIDTH> weights[VECTORS];
    if constexpr (SHIFTED) load_shifted(weights, weight, cols, number, 0.0f);
    auto weight_of = [&](int k, C (&w)[WIDTH]) {
        if constexpr (SHIFTED) weights[k].unpack(w);
        else Vector<T, WIDTH>::load(weight + first + k * step).unpack(w);
    };
    auto load_row = [&] {
        if constexpr (SHIFTED) {
            Vector<T, WIDTH> loaded[VECTORS];
            load_shifted(loaded, x_row, cols, number, 0.0f);
            memcpy(xs, loaded, sizeof xs);
            load_shifted(loaded, grad_row, cols, number, 0.0f);
            memcpy(grads, loaded, sizeof grads);
        }
    };
    auto load = [&](int k) {
        next_xs[k] = *reinterpret_cast<const Words<T, WIDTH>*>(x_row + first + k * step);
        next_grads[k] = *reinterpret_cast<const Words<T, WIDTH>*>(grad_row + first + k * step);
    };
    seek(blockIdx.x);
#pragma unroll
    for (int k = 0; k < VECTORS; k++)
        if (!SHIFTED && first + k * step < end) load(k);
    C mean = mean_of[blockIdx.x], rstd = rstd_of[blockIdx.x];

    int turn = 0;
    for (long long row = blockIdx.x; row < num_rows; row += gridDim.x, turn ^= 1) {
        const long long next = row + gridDim.x;
        C next_mean = 0, next_rstd = 0;
        load_row();
        if (next < num_rows) {
            seek(next);
            next_mean = mean_of[next];
            next_rstd = rstd_of[next];
        }
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if constexpr (!SHIFTED) xs[k] = next_xs[k], grads[k] = next_grads[k];
            if (EARLY && next < num_rows && first + k * step < end) load(k);
        }
        Sums<C> means{0, 0};
        if (grad_x) {
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                if (first + k * step >= end) continue;
                C numbers[WIDTH], to_bias[WIDTH], w[WIDTH];
                unpack<T, WIDTH>(xs[k], numbers);
                unpack<T, WIDTH>(grads[k], to_bias);
                weight_of(k, w);
#pragma unroll
                for (int j = 0; j < WIDTH; j++) {
                    const C grad_normal = rounded_product(to_bias[j], w[j]);
                    means.first += grad_normal;
                    means.second += grad_normal * ((numbers[j] - mean) * rstd);
                }
            }
            means = sum_over_row(means, turn);
            means = {means.first * reciprocal, means.second * reciprocal};
        }
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            // The lanes of a warp store their shifted vectors together, so that those without a vector take part.
            if (first + k * step - (SHIFTED ? int(threadIdx.x % 32) * WIDTH : 0) >= end) continue;
            C numbers[WIDTH], to_weight[WIDTH], to_bias[WIDTH], w[WIDTH];
            Vector<T, WIDTH> grad;
            unpack<T, WIDTH>(xs[k], numbers);
            unpack<T, WIDTH>(grads[k], to_bias);
            weight_of(k, w);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const C normal = (numbers[j] - mean) * rstd;
                to_weight[j] = to_bias[j] * normal;
                const C grad_normal = rounded_product(to_bias[j], w[j]);
                grad.at[j] = T((grad_normal - means.first - normal * means.second) * rstd);
            }
            if (!EARLY && !SHIFTED && next < num_rows) load(k);
            if constexpr (SHIFTED) {
                if (grad_x) store_shifted(grad_x + row * cols, cols, number(k), grad);
            } else {
                if (grad_x) grad.store(grad_x + row * cols + first + k * step);
            }
            if (partial) accumulators.add(k, to_weight, to_bias);
        }
        mean = next_mean;
        rstd = next_rstd;
    }
    if (!partial) return;
    partial += blockIdx.x * cols;
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const int column = first + k * step;
        if (column >= end) continue;
        C *of_weight = partial + column, *of_bias = of_weight + gridDim.x * cols;
        if constexpr (SHIFTED) accumulators.store_some(k, of_weight, of_bias, end - column);
        else accumulators.store(k, of_weight, of_bias);
    }
}

// Rows in whole vectors, which the copy engine brings to shared memory.
template <class T, int VECTORS>
__global__ void __launch_bounds__(512) layer_norm_forward_staged_kernel(
    const T* __restrict__ x,           // [outer, inner, cols], strided, in whole vectors
    const T* __restrict__ weight,      // [cols]
    const T* __restrict__ bias,        // [cols]
    T* __restrict__ output,            // [outer * inner, cols]
    Compute<T>* __restrict__ mean_of,  // [outer * inner]
    Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    long long num_rows, long long cols, long long inner, long long outer_stride, long long inner_stride, double eps,
    int stages) {
    // One block or cluster owns one row in as many as there are blocks or clusters.
    using C = Compute<T>;
    constexpr int WIDTH = IN_16_BYTES<T>;
    const int block = block_in_cluster(), blocks = blocks_in_cluster();
    if (blocks > 1) cluster_arrive();
    const long long rows_apart = num_clusters();
    long long row = cluster_id();
    Stages<1> staged(stages, Slice(cols / WIDTH, block, blocks));
    const int first = staged.slice.first, count = staged.slice.count;
    auto fill = [&](int stage, long long row) {
        if (threadIdx.x > 0 || row >= num_rows) return;
        staged.fill(stage, x + row_offset(row, inner, outer_stride, inner_stride));
    };
    for (int i = 0; i < stages; i++) fill(i, row + i * rows_apart);
    Vector<T, WIDTH> weights[VECTORS], biases[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i >= count) continue;
        weights[k] = Vector<T, WIDTH>::load(weight + (long long)(first + i) * WIDTH);
        biases[k] = Vector<T, WIDTH>::load(bias + (long long)(first + i) * WIDTH);
    }
    if (blocks > 1) cluster_wait();
    for (; row < num_rows; row += rows_apart) {
        staged.wait();
        auto numbers_of = [&](int i, C (&numbers)[WIDTH]) {
            vector_at<T>(staged.of(staged.present, 0) + i).unpack(numbers);
        };
        Sums<C> sum{0, 0};
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int i = threadIdx.x + k * blockDim.x;
            if (i >= count) continue;
            C numbers[WIDTH];
            numbers_of(i, numbers);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) sum.first += numbers[j];
        }
        C mean = sum_over_row(sum, 0).first;
        if (blocks > 1) mean = sum_of_blocks(mean, block, blocks, 0);
        mean /= C(cols);
        sum = {0, 0};
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int i = threadIdx.x + k * blockDim.x;
            if (i >= count) continue;
            C numbers[WIDTH];
            numbers_of(i, numbers);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) sum.first += (numbers[j] - mean) * (numbers[j] - mean);
        }
        C variance = sum_over_row(sum, 1).first;
        if (blocks > 1) variance = sum_of_blocks(variance, block, blocks, 1);
        variance /= C(cols);
        const C rstd = rsqrt(variance + C(eps));
        if (threadIdx.x == 0 && block == 0) {
            mean_of[row] = mean;
            rstd_of[row] = rstd;
        }
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int i = threadIdx.x + k * blockDim.x;
            if (i >= count) continue;
            C numbers[WIDTH], w[WIDTH], b[WIDTH];
            numbers_of(i, numbers);
            weights[k].unpack(w);
            biases[k].unpack(b);
            Vector<T, WIDTH> result;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) result.at[j] = T((numbers[j] - mean) * rstd * w[j] + b[j]);
            result.store_streaming(output + row * cols + (long long)(first + i) * WIDTH);
        }
        staged.release();
        fill(staged.present, row + stages * rows_apart);
        staged.pass_on();
    }
}

template <class T, int VECTORS>
__global__ void __launch_bounds__(512) layer_norm_backward_staged_kernel(
    const T* __restrict__ grad_output,       // [outer, inner, cols], strided, in whole vectors
    const T* __restrict__ x,                 // [outer, inner, cols], strided, in whole vectors
    const T* __restrict__ weight,            // [cols]
    const Compute<T>* __restrict__ mean_of,  // [outer * inner]
    const Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    T* __restrict__ grad_x,                  // [outer * inner, cols], or null where not needed
    Compute<T>* __restrict__ partial,        // [2, clusters, cols], or null: the sums over a cluster's rows
    long long num_rows, long long cols, long long inner, long long grad_outer_stride, long long grad_inner_stride,
    long long x_outer_stride, long long x_inner_stride, int stages) {
    // One block or cluster owns one row in as many as there are blocks or clusters.
    using C = Compute<T>;
    constexpr int WIDTH = IN_16_BYTES<T>;
    const int block = block_in_cluster(), blocks = blocks_in_cluster();
    if (blocks > 1) cluster_arrive();
    const long long rows_apart = num_clusters();
    long long row = cluster_id();
    Stages<2> staged(stages, Slice(cols / WIDTH, block, blocks));
    const int first = staged.slice.first, count = staged.slice.count;
    auto fill = [&](int stage, long long row) {
        if (threadIdx.x > 0 || row >= num_rows) return;
        staged.fill(stage, x + row_offset(row, inner, x_outer_stride, x_inner_stride),
                    grad_output + row_offset(row, inner, grad_outer_stride, grad_inner_stride));
    };
    for (int i = 0; i < stages; i++) fill(i, row + i * rows_apart);
    Vector<T, WIDTH> weights[VECTORS];
    C of_weight[VECTORS][WIDTH] = {}, of_bias[VECTORS][WIDTH] = {};
    load_columns(weights, weight, staged.slice);
    C next_mean = row < num_rows ? mean_of[row] : C(0), next_rstd = row < num_rows ? rstd_of[row] : C(0);
    if (blocks > 1) cluster_wait();
    int turn = 0;
    for (; row < num_rows; row += rows_apart, turn ^= 1) {
        const C mean = next_mean, rstd = next_rstd;
        if (row + rows_apart < num_rows) next_mean = mean_of[row + rows_apart], next_rstd = rstd_of[row + rows_apart];
        staged.wait();
        // The normalized numbers of a vector, the cotangent, and its product with weight.
        auto load = [&](int k, int i, C (&normals)[WIDTH], C (&grads)[WIDTH], C (&of_normals)[WIDTH]) {
            vector_at<T>(staged.of(staged.present, 0) + i).unpack(normals);
            vector_at<T>(staged.of(staged.present, 1) + i).unpack(grads);
            weights[k].unpack(of_normals);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                normals[j] = (normals[j] - mean) * rstd;
                of_normals[j] = rounded_product(grads[j], of_normals[j]);
            }
        };
        Sums<C> sums{0, 0};
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int i = threadIdx.x + k * blockDim.x;
            if (i >= count) continue;
            C normals[WIDTH], grads[WIDTH], of_normals[WIDTH];
            load(k, i, normals, grads, of_normals);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                sums.first += of_normals[j];
                sums.second += of_normals[j] * normals[j];
                of_weight[k][j] += grads[j] * normals[j];
                of_bias[k][j] += grads[j];
            }
        }
        if (grad_x) {
            sums = sum_over_row(sums, turn);
            C means[] = {sums.first, sums.second};
            if (blocks > 1) add_over_blocks(means, block, blocks, turn);
            means[0] /= C(cols);
            means[1] /= C(cols);
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                const int i = threadIdx.x + k * blockDim.x;
                if (i >= count) continue;
                C normals[WIDTH], grads[WIDTH], of_normals[WIDTH];
                load(k, i, normals, grads, of_normals);
                Vector<T, WIDTH> grad;
#pragma unroll
                for (int j = 0; j < WIDTH; j++)
                    grad.at[j] = T((of_normals[j] - means[0] - normals[j] * means[1]) * rstd);
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
        for (int j = 0; j < WIDTH; j++) {
            partial[(long long)i * WIDTH + j] = of_weight[k][j];
            partial[num_clusters() * cols + (long long)i * WIDTH + j] = of_bias[k][j];
        }
    }
}

// Vectors of each input that a thread loads before it uses the first.
constexpr int IN_FLIGHT = 4;

template <class T, int WIDTH>
__global__ void __launch_bounds__(512) layer_norm_backward_means_kernel(
    const T* __restrict__ grad_output,       // [outer, inner, cols], strided
    const T* __restrict__ x,                 // [outer, inner, cols], strided
    const T* __restrict__ weight,            // [cols], strided
    const Compute<T>* __restrict__ mean_of,  // [outer * inner]
    const Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    Compute<T>* __restrict__ means,  // [2, outer * inner]: row means of grad_normal and of grad_normal * normal
    long long num_rows, long long cols, long long inner, long long grad_outer_stride, long long grad_inner_stride,
    long long grad_column_stride, long long x_outer_stride, long long x_inner_stride, long long x_column_stride,
    long long weight_stride) {
    // One block owns blockDim.y consecutive rows, one thread every blockDim.x-th vector of each.
    using C = Compute<T>;
    const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    if (row >= num_rows) return;
    x += row_offset(row, inner, x_outer_stride, x_inner_stride);
    grad_output += row_offset(row, inner, grad_outer_stride, grad_inner_stride);
    const C mean = mean_of[row], rstd = rstd_of[row];
    const int step = blockDim.x * WIDTH;
    Sums<C> sums{0, 0};
    for (long long start = threadIdx.x * WIDTH; start < cols; start += IN_FLIGHT * step) {
        Vector<T, WIDTH> xs[IN_FLIGHT], grads[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (start + k * step >= cols) continue;
            xs[k] = take<WIDTH>(x, start + k * step, x_column_stride);
            grads[k] = take<WIDTH>(grad_output, start + k * step, grad_column_stride);
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (start + k * step >= cols) continue;
            const auto w = take<WIDTH>(weight, start + k * step, weight_stride);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const C grad_normal = rounded_product(C(grads[k].at[j]), C(w.at[j]));
                sums.first += grad_normal;
                sums.second += grad_normal * ((C(xs[k].at[j]) - mean) * rstd);
            }
        }
    }
    sums = sum_over_row(sums, 0);
    if (threadIdx.x == 0) {
        means[row] = sums.first / C(cols);
        means[num_rows + row] = sums.second / C(cols);
    }
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(128, 3) layer_norm_backward_columns_kernel(
    const T* __restrict__ grad_output,       // [outer, inner, cols], strided
    const T* __restrict__ x,                 // [outer, inner, cols], strided
    const T* __restrict__ weight,            // [cols], strided
    const Compute<T>* __restrict__ mean_of,  // [outer * inner]
    const Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    const Compute<T>* __restrict__ means,    // [2, outer * inner]
    T* __restrict__ grad_x,                  // [outer * inner, cols], or null where not needed
    Compute<T>* __restrict__ partial,        // [2, gridDim.y, cols], or null: the sums over a block's rows
    long long num_rows, long long cols, long long inner, long long grad_outer_stride, long long grad_inner_stride,
    long long grad_column_stride, long long x_outer_stride, long long x_inner_stride, long long x_column_stride,
    long long weight_stride) {
    // One block owns blockDim.x vectors of columns of every gridDim.y-th row, one thread one of these vectors.
    using C = Compute<T>;
    const long long column = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * WIDTH;
    if (column >= cols) return;
    C grad_weight[WIDTH] = {}, grad_bias[WIDTH] = {};
    const auto w = take<WIDTH>(weight, column, weight_stride);
    for (long long start = blockIdx.y; start < num_rows; start += IN_FLIGHT * gridDim.y) {
        Vector<T, WIDTH> xs[IN_FLIGHT], grads[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            const long long row = start + k * gridDim.y;
            if (row >= num_rows) continue;
            xs[k] = take<WIDTH>(x + row_offset(row, inner, x_outer_stride, x_inner_stride), column, x_column_stride);
            grads[k] = take<WIDTH>(
                grad_output + row_offset(row, inner, grad_outer_stride, grad_inner_stride), column, grad_column_stride);
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            const long long row = start + k * gridDim.y;
            if (row >= num_rows) continue;
            const C mean = mean_of[row], rstd = rstd_of[row];
            const C mean_grad = grad_x ? means[row] : C(0), mean_product = grad_x ? means[num_rows + row] : C(0);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const C grad = C(grads[k].at[j]), normal = (C(xs[k].at[j]) - mean) * rstd;
                grad_weight[j] += grad * normal;
                grad_bias[j] += grad;
                const C grad_normal = rounded_product(grad, C(w.at[j]));
                grads[k].at[j] = T((grad_normal - mean_grad - normal * mean_product) * rstd);
            }
            if (grad_x) grads[k].store(grad_x + row * cols + column);
        }
    }
    if (!partial) return;
    partial += blockIdx.y * cols + column;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        partial[j] = grad_weight[j];
        partial[gridDim.y * cols + j] = grad_bias[j];
    }
}

template <class T>
__global__ void __launch_bounds__(1024) layer_norm_sum_partials_kernel(
    const Compute<T>* __restrict__ partial,  // [2, partials, cols]
    T* __restrict__ grad_weight,             // [cols], or null where not needed
    T* __restrict__ grad_bias,               // [cols], or null where not needed
    long long partials, long long cols) {
    // One block owns 32 columns, one thread every blockDim.y-th partial sum of one of them.
    using C = Compute<T>;
    __shared__ Sums<C> of_threads[32][32];
    const long long column = blockIdx.x * 32ll + threadIdx.x;
    Sums<C> sums{0, 0};
    if (column < cols) {
#pragma unroll 4
        for (long long i = threadIdx.y; i < partials; i += blockDim.y) {
            sums.first += partial[i * cols + column];
            sums.second += partial[(partials + i) * cols + column];
        }
    }
    of_threads[threadIdx.y][threadIdx.x] = sums;
    __syncthreads();
    if (threadIdx.y > 0 || column >= cols) return;
    for (int i = 1; i < blockDim.y; i++) {
        sums.first += of_threads[i][threadIdx.x].first;
        sums.second += of_threads[i][threadIdx.x].second;
    }
    if (grad_weight) grad_weight[column] = T(sums.first);
    if (grad_bias) grad_bias[column] = T(sums.second);
}
