// Norms of rows and their gradients. A number is divided by the root of its row's mean square, or with MEAN first less
// the row's mean, and then multiplied by weight. With MEAN a bias is added, and the squares are those of deviations.
#pragma once
#include "clusters.cuh"
#include "rows.cuh"
#include "staged.cuh"

// A product that is rounded by itself. Fused with the subtraction of its mean, it would leave its rounding error where
// all products of a row are equal, and the gradient is 0.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The sum over the threads of a row. Rows that are SHORT share warps: a power of two of lanes each.
template <bool SHORT, class C> __device__ C row_sum(C value, int turn) {
    if constexpr (SHORT) return sum_of_lanes(value, blockDim.x);
    else return sum_over_row(Sums<C>{value, C(0)}, turn).first;
}
template <class C> __device__ C row_sum(C value, int turn) {
    return blockDim.x > 32 ? row_sum<false>(value, turn) : row_sum<true>(value, turn);
}

// A division by the same number, without the instructions for a reciprocal that a division of its own takes. The rest
// rounds the quotient as it is rounded there, but for infinite and subnormal ones.
template <class C> struct Divisor {
    C number, reciprocal;

    __device__ Divisor(long long count) : number(computed_here(C(count))), reciprocal(computed_here(1 / number)) {}
    __device__ C divide(C dividend) const {
        const C quotient = dividend * reciprocal, rest = fma(-quotient, number, dividend);
        return rest == rest ? fma(rest, reciprocal, quotient) : quotient;
    }
};

template <bool MEAN, class C> __device__ C normalized(C number, C mean, C rstd) {
    if constexpr (MEAN) number -= mean;
    return number * rstd;
}
// Normalizes a vector of a row, and applies the parameters of its columns.
template <bool MEAN, class T, int WIDTH, class C>
__device__ void normalize(
    Vector<T, WIDTH>& vector, const Vector<T, WIDTH>& weight, const Vector<T, WIDTH>& bias, C mean, C rstd) {
    C numbers[WIDTH], w[WIDTH], b[WIDTH];
    vector.unpack(numbers);
    weight.unpack(w);
    if constexpr (MEAN) bias.unpack(b);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        C result = normalized<MEAN>(numbers[j], mean, rstd) * w[j];
        if constexpr (MEAN) result += b[j];
        vector.at[j] = T(result);
    }
}

// The sums over a row of grad_normal, which only MEAN needs, and of grad_normal * normal.
template <bool MEAN, bool SHORT, class C> __device__ Sums<C> sums_of_gradients(Sums<C> sums, int turn) {
    if constexpr (MEAN) return sum_over_row(sums, turn);
    else return {C(0), row_sum<SHORT>(sums.second, turn)};
}

// The gradient of a number of a row, from that of its normalized one and the means of `sums_of_gradients`.
template <bool MEAN, class C> __device__ C gradient(C of_normal, C normal, const Sums<C>& means, C rstd) {
    if constexpr (MEAN) of_normal -= means.first;
    return (of_normal - normal * means.second) * rstd;
}

// The first of the columns of a piece that a thread has, and how far they are apart. ADJACENT ones of a warp are
// neighbours, so that their places are constants.
template <int WIDTH, int VECTORS, bool ADJACENT> __device__ int first_column() {
    return ADJACENT ? threadIdx.x / 32 * (32 * VECTORS) + threadIdx.x % 32 : threadIdx.x * WIDTH;
}
template <int WIDTH, bool ADJACENT> __device__ int columns_apart() { return ADJACENT ? 32 : blockDim.x * WIDTH; }

// x plus the residual, rounded once: what is normalized is what is returned.
template <class T, int WIDTH> __device__ void add_to(Vector<T, WIDTH>& x, const Vector<T, WIDTH>& residual) {
    Compute<T> numbers[WIDTH], others[WIDTH];
    x.unpack(numbers);
    residual.unpack(others);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) x.at[j] = T(numbers[j] + others[j]);
}

// Rows of so many vectors a thread stay in the registers of all blocks of a cluster.
template <int WIDTH, int VECTORS> constexpr bool SHARED_ROW = WIDTH > 1 && VECTORS == 8;
// The most threads of a block forward, and the fewest blocks of a multiprocessor: two load such rows in turn, where the
// registers suffice. With 0 the compiler keeps registers for several blocks, with 1 it does not.
template <int WIDTH, int VECTORS, bool MEAN, bool ADDED>
constexpr int FORWARD_THREADS = SHARED_ROW<WIDTH, VECTORS> && !MEAN && !ADDED ? 384 : 512;
template <int WIDTH, int VECTORS, bool ADDED> constexpr int RESIDENT = SHARED_ROW<WIDTH, VECTORS> && !ADDED ? 2 : 0;

// With ADJACENT, the single columns of a row are adjacent, and a row has whole warps. With ADDED, a residual is added to
// x before it is normalized.
template <class T, int WIDTH, int VECTORS, bool ADJACENT, bool MEAN, bool ADDED>
__global__ void __launch_bounds__(FORWARD_THREADS<WIDTH, VECTORS, MEAN, ADDED>, RESIDENT<WIDTH, VECTORS, ADDED>)
norm_forward_kernel(
    long long num_rows, long long cols, long long inner, long long outer_stride,
    const T* __restrict__ x,           // [outer, inner, cols], strided
    const T* __restrict__ weight,      // [cols], strided
    const T* __restrict__ bias,        // [cols], strided, or null unless MEAN
    T* __restrict__ output,            // [outer * inner, cols]
    double eps,
    Compute<T>* __restrict__ mean_of,  // [outer * inner], or null unless MEAN
    Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    const T* __restrict__ residual,    // [outer, inner, cols], strided, or null unless ADDED
    T* __restrict__ sums,              // [outer * inner, cols]: x + residual, or null unless ADDED
    long long residual_outer_stride, long long inner_stride, long long residual_inner_stride, long long column_stride,
    long long residual_column_stride, long long weight_stride, long long bias_stride) {
    // The parameters stand in the order of their use, because they arrive in lines of 64 bytes, and each is waited for.
    // One block owns blockDim.y consecutive rows, one thread VECTORS vectors of each piece of a row (mostly one). The
    // last piece stays in registers, the pieces before it are read twice. A cluster owns a SHARED row, a block a piece.
    using C = Compute<T>;
    constexpr bool SHARED = SHARED_ROW<WIDTH, VECTORS>;
    const long long row = SHARED ? cluster_id() : blockIdx.x * (long long)blockDim.y + threadIdx.y;
    Exchange<C, 1> exchange(SHARED ? blocks_in_cluster() : 1);
    // Where registers are left, the residual is loaded together with x, and the parameters of a row of one piece, too.
    constexpr bool ONE_PIECE = VECTORS == 2, AT_ONCE = VECTORS <= 8;
    // The parameters of a SHARED row are loaded while its sums are exchanged, where registers are left.
    constexpr bool EARLY_PARAMETERS = SHARED && (ADDED || !MEAN);
    // A row past the end has no columns: its lanes take part in sums of their warp. A jump takes a short row longer.
    const bool present = row < num_rows;
    const long long from = ONE_PIECE && !present ? 0 : row;
    if (!present) cols = 0;
    if (ONE_PIECE || present) x += row_offset(from, inner, outer_stride, inner_stride);
    output += row * cols;
    if constexpr (ADDED) {
        if (ONE_PIECE || present) residual += row_offset(from, inner, residual_outer_stride, residual_inner_stride);
        sums += row * cols;
    }
    const int first = first_column<WIDTH, VECTORS, ADJACENT>(), step = columns_apart<WIDTH, ADJACENT>();
    const int piece = blockDim.x * WIDTH * VECTORS;
    constexpr bool STRIDED = WIDTH == 1 && !ADJACENT;
    Vector<T, WIDTH> data[VECTORS], residuals[VECTORS], weights[VECTORS], biases[VECTORS];
    // The columns from `start` on, of a piece. They are compared in 32 bits, as 64 take as long as several elements.
    auto columns_from = [&](long long start) { return int(min(cols - start, (long long)piece)); };
    auto load_residual = [&](int k, long long column) {
        if constexpr (ADDED) residuals[k] = take<WIDTH, STRIDED>(residual, column, residual_column_stride);
    };
    auto load_parameters = [&](int k, long long column) {
        weights[k] = take<WIDTH, STRIDED>(weight, column, weight_stride);
        if constexpr (MEAN) biases[k] = take<WIDTH, STRIDED>(bias, column, bias_stride);
    };
    auto load = [&](long long start, bool store_sums) {
        const int columns = columns_from(start);
        auto at = [&](int k) { return start + first + k * step; };
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (first + k * step >= columns) continue;
            data[k] = take<WIDTH, STRIDED>(x, at(k), column_stride);
            if constexpr (AT_ONCE) load_residual(k, at(k));
            if constexpr (ONE_PIECE) load_parameters(k, at(k));
        }
        if constexpr (ADDED) {
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                if (first + k * step >= columns) continue;
                if constexpr (!AT_ONCE) load_residual(k, at(k));
                add_to(data[k], residuals[k]);
                if (store_sums) data[k].store(sums + at(k));
            }
        }
    };

    long long last = 0;  // where the piece in registers begins
    // Pairs take a short row less time, and a thread with many vectors more registers.
    auto add_to_sum = [](C& sum, const C (&numbers)[WIDTH]) {
        if constexpr (ONE_PIECE) {
            sum += sum_in_pairs(numbers);
        } else {
#pragma unroll
            for (int j = 0; j < WIDTH; j++) sum += numbers[j];
        }
    };
    auto sum_of = [&](int columns) {
        C sum = 0;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (first + k * step >= columns) continue;
            C numbers[WIDTH];
            data[k].unpack(numbers);
            add_to_sum(sum, numbers);
        }
        return sum;
    };
    // The sum of squares, with MEAN of the differences from it.
    auto squares_of = [&](int columns, C mean) {
        C squares = 0;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (first + k * step >= columns) continue;
            C numbers[WIDTH];
            data[k].unpack(numbers);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                if constexpr (MEAN) numbers[j] -= mean;
                numbers[j] *= numbers[j];
            }
            add_to_sum(squares, numbers);
        }
        return squares;
    };

    C mean = 0, mean_square;
    if constexpr (SHARED) {
        last = block_in_cluster() * piece;
        load(last, true);
        const int columns = columns_from(last);
        // Waiting here keeps the loads of parameters behind those of x. Half types would spill registers.
        constexpr bool WAIT_FIRST = MEAN || ADDED || sizeof(T) > 2;
        if constexpr (WAIT_FIRST) exchange.wait_for_blocks();
        auto sum_over_blocks = [&](C sum, int turn) {
            sum = row_sum<false>(sum, turn);
            if (blocks_in_cluster() == 1) return sum;
            if constexpr (!WAIT_FIRST) exchange.wait_for_blocks();
            return exchange.sum(sum, turn);
        };
        auto forget_unpacked = [&] {
#pragma unroll
            for (int k = 0; k < VECTORS; k++) data[k].forget_unpacked();
        };
        if constexpr (MEAN) {
            mean = sum_over_blocks(sum_of(columns), 0) / C(cols);
            forget_unpacked();
        }
        const C squares = squares_of(columns, mean);
        if constexpr (MEAN) forget_unpacked();
        if constexpr (EARLY_PARAMETERS) {
#pragma unroll
            for (int k = 0; k < VECTORS; k++)
                if (first + k * step < columns) load_parameters(k, last + first + k * step);
        }
        mean_square = sum_over_blocks(squares, 1) / C(cols);
    } else if constexpr (ONE_PIECE) {
        load(0, true);
        // Computed while the loads are under way.
        output = computed_here(output);
        const Divisor<C> count(cols);
        const int columns = columns_from(0);
        if constexpr (MEAN) mean = count.divide(row_sum(sum_of(columns), 0));
        mean_square = count.divide(row_sum(squares_of(columns, mean), 1));
    } else {
        C squares = 0;
        for (long long start = 0; start == 0 || start < cols; start += piece) {
            last = start;
            load(start, true);
            const int columns = columns_from(start);
            if constexpr (MEAN) {
                // Merge the squared deviations of two samples: Chan, Golub, LeVeque 1983, (2.1).
                const C num = C(columns), piece_mean = row_sum(sum_of(columns), 0) / num;
                const C share = num / (C(start) + num), apart = piece_mean - mean;
                mean += apart * share;
                // Keep this order of factors: before the first piece, apart is its mean, whose square may overflow.
                squares += row_sum(squares_of(columns, piece_mean), 1) + C(start) * apart * (apart * share);
            } else {
                squares += squares_of(columns, mean);
            }
        }
        if constexpr (!MEAN) squares = row_sum(squares, 0);
        mean_square = squares / C(cols);
    }
    const C rstd = rsqrt(mean_square + C(eps));
    auto store_statistics = [&] {
        if (threadIdx.x > 0 || !present || (SHARED && last > 0)) return;
        if constexpr (MEAN) mean_of[row] = mean;
        rstd_of[row] = rstd;
    };
    // A short row's results are stored first, because they are waited for.
    if constexpr (!ONE_PIECE) store_statistics();

    // Walk backwards, because the last piece is still in registers and the pieces before it are in a cache.
    for (long long start = last; start >= 0; start -= piece) {
        if (start < last) load(start, false);
        const int columns = columns_from(start);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (first + k * step >= columns) continue;
            if constexpr (!ONE_PIECE && !EARLY_PARAMETERS) load_parameters(k, start + first + k * step);
            normalize<MEAN>(data[k], weights[k], biases[k], mean, rstd);
            data[k].store(output + start + first + k * step);
        }
        if constexpr (ONE_PIECE || SHARED) break;
    }
    if constexpr (ONE_PIECE) store_statistics();
}

// A vector before it is split into elements. Half types would else be split as soon as they arrive, so the thread would
// wait for them.
template <class T, int WIDTH> struct WordsOf { using type = uint4; };
template <class T> struct WordsOf<T, 1> { using type = T; };
template <class T, int WIDTH> using Words = typename WordsOf<T, WIDTH>::type;

// A vector of a row, as its numbers where registers are left for them.
template <class T, int WIDTH, bool AS_NUMBERS> struct Kept {
    Words<T, WIDTH> words;
    Compute<T> numbers[AS_NUMBERS ? WIDTH : 1];

    __device__ void keep(const Words<T, WIDTH>& from) {
        if constexpr (AS_NUMBERS) split(from, numbers);
        else words = from;
    }
    __device__ void unpack(Compute<T> (&to)[WIDTH]) const {
        if constexpr (AS_NUMBERS) {
#pragma unroll
            for (int j = 0; j < WIDTH; j++) to[j] = numbers[j];
        } else {
            split(words, to);
        }
    }
    __device__ static void split(const Words<T, WIDTH>& words, Compute<T> (&to)[WIDTH]) {
        Vector<T, WIDTH> vector;
        memcpy(&vector, &words, sizeof words);
        vector.unpack(to);
    }
};

// The sums over a block's rows for the columns of a thread, in registers or in shared memory: of weight's gradient and of
// bias's. In shared memory each thread has its own 16 bytes in every 16 * blockDim.x.
template <class C, int WIDTH, int VECTORS, int PARAMETERS, bool SHARED> struct Accumulators {
    static constexpr int IN_PART = WIDTH == 1 ? 1 : IN_16_BYTES<C>, PARTS = WIDTH / IN_PART;
    using Part = Vector<C, IN_PART>;
    Part own[SHARED ? 1 : VECTORS * PARAMETERS * PARTS];

    __device__ Accumulators() {
#pragma unroll
        for (int i = 0; i < VECTORS * PARAMETERS * PARTS; i++) part(i) = {};
    }
    __device__ Part& part(int i) {
        extern __shared__ __align__(16) unsigned char raw[];
        if constexpr (SHARED) return reinterpret_cast<Part*>(raw)[threadIdx.x + i * blockDim.x];
        else return own[i];
    }
    // Adds to the sums of vector k.
    __device__ void add(int parameter, int k, const C (&values)[WIDTH]) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const int at = (k * PARAMETERS + parameter) * PARTS + i;
            Part sum = part(at);
#pragma unroll
            for (int j = 0; j < IN_PART; j++) sum.at[j] += values[i * IN_PART + j];
            part(at) = sum;
        }
    }
    __device__ C get(int parameter, int k, int j) {
        return part((k * PARAMETERS + parameter) * PARTS + j / IN_PART).at[j % IN_PART];
    }
};

// How a block walks through rows: it has one at a time, several short ones, or one that leaves no registers for the sums
// over rows, which are kept in shared memory.
enum Way { ONE, SEVERAL, SHARED };

// Threads of a block of several rows.
constexpr int TOGETHER = 256;

// Whether 80 registers suffice for a thread of backward. Else it needs 128.
template <class T, int VECTORS, Way WAY, bool MEAN>
constexpr bool FEW = MEAN && WAY <= SEVERAL && VECTORS == 2 && sizeof(T) > 2;

// Vectors or numbers of each input that a thread loads before it uses the first.
constexpr int IN_FLIGHT = 4;

// Columns of a block of `sum_columns`.
constexpr int SUMMED = 8;

// Writes the gradients of weight and bias for SUMMED adjacent columns from `first` on: the sums over all rows.
template <class T, bool MEAN>
__device__ void sum_columns(
    const T* grad_output, const T* x, const Compute<T>* mean_of, const Compute<T>* rstd_of, T* grad_weight,
    T* grad_bias, long long num_rows, long long cols, long long first, long long inner, long long grad_outer_stride,
    long long grad_inner_stride, long long x_outer_stride, long long x_inner_stride) {
    using C = Compute<T>;
    __shared__ C of_warps[2][16][SUMMED];
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    const long long column = first + thread % SUMMED;
    Sums<C> sums{0, 0};
    const int apart = threads / SUMMED;
    for (long long start = thread / SUMMED; column < cols && start < num_rows; start += IN_FLIGHT * apart) {
        T grads[IN_FLIGHT], numbers[IN_FLIGHT];
        C means[IN_FLIGHT], rstds[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            const long long row = min(start + k * apart, num_rows - 1);
            grads[k] = grad_output[row_offset(row, inner, grad_outer_stride, grad_inner_stride) + column];
            numbers[k] = x[row_offset(row, inner, x_outer_stride, x_inner_stride) + column];
            means[k] = MEAN ? mean_of[row] : C(0);
            rstds[k] = rstd_of[row];
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            // Selected without a branch, behind which the compiler would load.
            const bool present = start + k * apart < num_rows;
            const C product = C(grads[k]) * normalized<MEAN>(C(numbers[k]), means[k], rstds[k]);
            sums.first += present ? product : C(0);
            if constexpr (MEAN) sums.second += present ? C(grads[k]) : C(0);
        }
    }
#pragma unroll
    for (int lanes = SUMMED; lanes < 32; lanes *= 2) {
        sums.first += __shfl_xor_sync(~0u, sums.first, lanes);
        if constexpr (MEAN) sums.second += __shfl_xor_sync(~0u, sums.second, lanes);
    }
    if (thread % 32 < SUMMED) {
        of_warps[0][thread / 32][thread % 32] = sums.first;
        of_warps[1][thread / 32][thread % 32] = sums.second;
    }
    __syncthreads();
    if (thread >= SUMMED || column >= cols) return;
    for (int warp = 1; warp < threads / 32; warp++) {
        sums.first += of_warps[0][warp][thread];
        sums.second += of_warps[1][warp][thread];
    }
    if (grad_weight) grad_weight[column] = T(sums.first);
    if (MEAN && grad_bias) grad_bias[column] = T(sums.second);
}

// With ADDED, another gradient of x is added to the one through the norm, before their sum is rounded.
template <class T, int WIDTH, int VECTORS, Way WAY, bool MEAN, bool ADDED>
__global__ void __launch_bounds__(FEW<T, VECTORS, WAY, MEAN> ? 256 : 512, FEW<T, VECTORS, WAY, MEAN> ? 3 : 1)
norm_backward_kernel(
    long long row_blocks, long long num_rows, long long cols, long long inner, long long grad_outer_stride,
    long long x_outer_stride,
    const T* __restrict__ grad_output,       // [outer, inner, cols], vectors of WIDTH columns adjacent
    const T* __restrict__ x,                 // [outer, inner, cols], vectors of WIDTH columns adjacent
    const T* __restrict__ weight,            // [cols]
    const Compute<T>* __restrict__ mean_of,  // [outer * inner], or null unless MEAN
    const Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    const T* __restrict__ added,             // [outer * inner, cols], or null unless ADDED
    T* __restrict__ grad_x,                  // [outer * inner, cols], or null where not needed
    T* __restrict__ grad_weight,             // [cols], or null where not needed or summed from partial
    T* __restrict__ grad_bias,               // [cols], or null where not needed or summed from partial
    Compute<T>* __restrict__ partial,        // [parameters, blocks, cols], or null: the sums over a block's rows
    long long grad_inner_stride, long long x_inner_stride) {
    // The order of the parameters is that of their use, as forward.
    // One block owns blockDim.y rows in every row_blocks * blockDim.y, and each thread the same VECTORS of one of them.
    // Of few rows, further blocks sum the columns at the same time.
    using C = Compute<T>;
    if (blockIdx.x >= row_blocks) {
        sum_columns<T, MEAN>(
            grad_output, x, mean_of, rstd_of, grad_weight, grad_bias, num_rows, cols,
            (blockIdx.x - row_blocks) * SUMMED, inner, grad_outer_stride, grad_inner_stride, x_outer_stride,
            x_inner_stride);
        return;
    }
    constexpr bool AS_NUMBERS = !MEAN && WAY != SEVERAL;
    constexpr int PARAMETERS = MEAN ? 2 : 1;
    constexpr bool ADJACENT = WIDTH == 1 && WAY == ONE;
    const int first = first_column<WIDTH, VECTORS, ADJACENT>(), step = columns_apart<WIDTH, ADJACENT>(), end = cols;
    const long long rows_apart = row_blocks * blockDim.y;
    Accumulators<C, WIDTH, VECTORS, PARAMETERS, WAY == SHARED> sums;
    Words<T, WIDTH> next_x[VECTORS], next_grad[VECTORS];
    C next_mean = 0, next_rstd = 0;
    Kept<T, WIDTH, AS_NUMBERS> this_x[VECTORS], this_grad[VECTORS];
    using Row = Words<T, WIDTH>;
    // Short rows wait for each load: where registers are left, the added gradient is loaded early, or weight once. Single
    // columns of the added gradient are loaded early, too: they take few registers, and waiting for them takes long.
    constexpr bool SHORT = WAY == SEVERAL && sizeof(T) < 8, EARLY = ADDED && (SHORT || WIDTH == 1);
    constexpr bool HELD = SHORT && (!ADDED || sizeof(T) == 2);
    Row weights[HELD ? VECTORS : 1], others[EARLY ? VECTORS : 1];
    auto words_at = [&](const T* from, int k) { return *reinterpret_cast<const Row*>(from + first + k * step); };
    auto weight_of = [&](int k, C (&w)[WIDTH]) {
        Kept<T, WIDTH, true>::split(HELD ? weights[HELD ? k : 0] : words_at(weight, k), w);
    };
    auto load = [&](long long row) {
        if (row >= num_rows) return;
        const T* x_row = x + row_offset(row, inner, x_outer_stride, x_inner_stride);
        const T* grad_row = grad_output + row_offset(row, inner, grad_outer_stride, grad_inner_stride);
        if constexpr (MEAN) next_mean = mean_of[row];
        next_rstd = rstd_of[row];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (first + k * step >= end) continue;
            next_x[k] = words_at(x_row, k);
            next_grad[k] = words_at(grad_row, k);
        }
    };
    long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    // The next row is on its way while one is summed.
    load(row);
    if constexpr (HELD) {
#pragma unroll
        for (int k = 0; k < VECTORS; k++)
            if (first + k * step < end) weights[k] = words_at(weight, k);
    }
    const C reciprocal = computed_here(C(1) / C(cols));
    int turn = 0;
    // The rows of a warp begin their turns together, as they share its sums. One past the end has no columns.
    for (long long begin = row - threadIdx.y; begin < num_rows; begin += rows_apart, row += rows_apart, turn ^= 1) {
        const int own_end = WAY != SEVERAL || row < num_rows ? end : 0;
        const C mean = next_mean, rstd = next_rstd;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (AS_NUMBERS && first + k * step >= end) continue;
            this_x[k].keep(next_x[k]);
            this_grad[k].keep(next_grad[k]);
        }
        load(row + rows_apart);
        if constexpr (EARLY) {
#pragma unroll
            for (int k = 0; k < VECTORS; k++)
                if (first + k * step < own_end) others[k] = words_at(added + row * cols, k);
        }
        auto unpack = [&](int k, C (&normals)[WIDTH], C (&grads)[WIDTH], C (&of_normals)[WIDTH]) {
            this_x[k].unpack(normals);
            this_grad[k].unpack(grads);
            weight_of(k, of_normals);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                normals[j] = normalized<MEAN>(normals[j], mean, rstd);
                of_normals[j] = rounded_product(grads[j], of_normals[j]);
            }
        };
        // A row has the same bits however many lanes of a warp share it: its vectors are added up as lanes are.
        Sums<C> of_vectors[WAY == SEVERAL ? VECTORS : 1] = {};
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (first + k * step >= own_end) continue;
            Sums<C>& means = of_vectors[WAY == SEVERAL ? k : 0];
            C normals[WIDTH], grads[WIDTH], of_normals[WIDTH], to_weight[WIDTH];
            unpack(k, normals, grads, of_normals);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                if constexpr (MEAN) means.first += of_normals[j];
                means.second += of_normals[j] * normals[j];
                to_weight[j] = grads[j] * normals[j];
                // Keep the products, so that they are not computed twice.
                if constexpr (AS_NUMBERS) this_x[k].numbers[j] = normals[j], this_grad[k].numbers[j] = of_normals[j];
            }
            sums.add(0, k, to_weight);
            if constexpr (MEAN) sums.add(1, k, grads);
        }
        if (!grad_x) continue;
        if constexpr (WAY == SEVERAL) {
#pragma unroll
            for (int half = VECTORS / 2; half; half /= 2) {
#pragma unroll
                for (int k = 0; k < half; k++) {
                    if constexpr (MEAN) of_vectors[k].first += of_vectors[k + half].first;
                    of_vectors[k].second += of_vectors[k + half].second;
                }
            }
        }
        Sums<C> means = sums_of_gradients<MEAN, WAY == SEVERAL>(of_vectors[0], turn);
        if constexpr (MEAN) means.first *= reciprocal;
        means.second *= reciprocal;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (first + k * step >= own_end) continue;
            C normals[WIDTH], of_normals[WIDTH];
            if constexpr (AS_NUMBERS) {
                this_x[k].unpack(normals);
                this_grad[k].unpack(of_normals);
            } else {
                C grads[WIDTH];
                unpack(k, normals, grads, of_normals);
            }
            [[maybe_unused]] C to_add[WIDTH];
            if constexpr (EARLY) Kept<T, WIDTH, true>::split(others[k], to_add);
            else if constexpr (ADDED) Kept<T, WIDTH, true>::split(words_at(added + row * cols, k), to_add);
            Vector<T, WIDTH> grad;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                C of_x = gradient<MEAN>(of_normals[j], normals[j], means, rstd);
                if constexpr (ADDED) of_x += to_add[j];
                grad.at[j] = T(of_x);
            }
            grad.store(grad_x + row * cols + first + k * step);
        }
    }
    if (!partial) return;
    partial += blockIdx.x * cols;
#pragma unroll
    for (int of = 0; of < PARAMETERS; of++, partial += gridDim.x * cols) {
        if constexpr (WAY != SEVERAL) {
#pragma unroll
            for (int i = 0; i < VECTORS * WIDTH; i++) {
                const int column = first + i / WIDTH * step + i % WIDTH;
                if (column < end) partial[column] = sums.get(of, i / WIDTH, i % WIDTH);
            }
        } else {
            // The sums of the rows of a warp are added up, and then those of the warps.
            __shared__ C of_warps[TOGETHER / 32][32 * VECTORS * WIDTH];
            const int thread = threadIdx.y * blockDim.x + threadIdx.x;
            if (of > 0) __syncthreads();
#pragma unroll
            for (int i = 0; i < VECTORS * WIDTH; i++) {
                C sum = sums.get(of, i / WIDTH, i % WIDTH);
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
}

template <class T, int VECTORS, bool MEAN, bool ADDED>
__global__ void __launch_bounds__(512) norm_backward_staged_kernel(
    const T* __restrict__ grad_output,       // [outer, inner, cols], strided, in whole vectors
    const T* __restrict__ x,                 // [outer, inner, cols], strided, in whole vectors
    const T* __restrict__ weight,            // [cols]
    const Compute<T>* __restrict__ mean_of,  // [outer * inner], or null unless MEAN
    const Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    const T* __restrict__ added,             // [outer * inner, cols], or null unless ADDED
    T* __restrict__ grad_x,                  // [outer * inner, cols], or null where not needed
    Compute<T>* __restrict__ partial,        // [parameters, clusters, cols], or null: the sums over a cluster's rows
    long long num_rows, long long cols, long long inner, long long grad_outer_stride, long long grad_inner_stride,
    long long x_outer_stride, long long x_inner_stride, int stages) {
    // One block or cluster owns one row in as many as there are blocks or clusters.
    using C = Compute<T>;
    constexpr int WIDTH = IN_16_BYTES<T>, PARAMETERS = MEAN ? 2 : 1;
    const int block = block_in_cluster(), blocks = blocks_in_cluster();
    Exchange<C, PARAMETERS, true> exchange(blocks);
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
    C of_parameters[PARAMETERS][VECTORS][WIDTH] = {};
    load_columns(weights, weight, staged.slice);
    C next_mean = 0, next_rstd = 0;
    auto load_statistics = [&](long long row) {
        if (row >= num_rows) return;
        if constexpr (MEAN) next_mean = mean_of[row];
        next_rstd = rstd_of[row];
    };
    load_statistics(row);
    exchange.wait_for_blocks();
    int turn = 0;
    for (; row < num_rows; row += rows_apart, turn ^= 1) {
        const C mean = next_mean, rstd = next_rstd;
        load_statistics(row + rows_apart);
        staged.wait();
        // The normalized numbers of a vector, the cotangent, and its product with weight.
        auto load = [&](int k, int i, C (&normals)[WIDTH], C (&grads)[WIDTH], C (&of_normals)[WIDTH]) {
            vector_at<T>(staged.of(staged.present, 0) + i).unpack(normals);
            vector_at<T>(staged.of(staged.present, 1) + i).unpack(grads);
            weights[k].unpack(of_normals);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                normals[j] = normalized<MEAN>(normals[j], mean, rstd);
                of_normals[j] = rounded_product(grads[j], of_normals[j]);
            }
        };
        Sums<C> means{0, 0};
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int i = threadIdx.x + k * blockDim.x;
            if (i >= count) continue;
            C normals[WIDTH], grads[WIDTH], of_normals[WIDTH];
            load(k, i, normals, grads, of_normals);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                if constexpr (MEAN) means.first += of_normals[j];
                means.second += of_normals[j] * normals[j];
                of_parameters[0][k][j] += grads[j] * normals[j];
                if constexpr (MEAN) of_parameters[1][k][j] += grads[j];
            }
        }
        if (grad_x) {
            means = sums_of_gradients<MEAN, false>(means, turn);
            if (blocks > 1) {
                if constexpr (MEAN) {
                    C both[] = {means.first, means.second};
                    exchange.add(both, turn);
                    means = {both[0], both[1]};
                } else {
                    means.second = exchange.sum(means.second, turn);
                }
            }
            if constexpr (MEAN) means.first /= C(cols);
            means.second /= C(cols);
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                const int i = threadIdx.x + k * blockDim.x;
                if (i >= count) continue;
                C normals[WIDTH], grads[WIDTH], of_normals[WIDTH];
                load(k, i, normals, grads, of_normals);
                [[maybe_unused]] C to_add[WIDTH];
                if constexpr (ADDED) vector_at<T>(staged.of(staged.present, 2) + i).unpack(to_add);
                Vector<T, WIDTH> grad;
#pragma unroll
                for (int j = 0; j < WIDTH; j++) {
                    C of_x = gradient<MEAN>(of_normals[j], normals[j], means, rstd);
                    if constexpr (ADDED) of_x += to_add[j];
                    grad.at[j] = T(of_x);
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
    for (int of = 0; of < PARAMETERS; of++, partial += num_clusters() * cols) {
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int i = threadIdx.x + k * blockDim.x;
            if (i >= count) continue;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) partial[(long long)i * WIDTH + j] = of_parameters[of][k][j];
        }
    }
}

// All other rows are read twice: for their means, and by columns.
template <class T, int WIDTH, bool MEAN>
__global__ void __launch_bounds__(512) norm_backward_means_kernel(
    const T* __restrict__ grad_output,       // [outer, inner, cols], strided
    const T* __restrict__ x,                 // [outer, inner, cols], strided
    const T* __restrict__ weight,            // [cols], strided
    const Compute<T>* __restrict__ mean_of,  // [outer * inner], or null unless MEAN
    const Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    Compute<T>* __restrict__ means,  // [2, outer * inner]: row means of grad_normal and of grad_normal * normal
    long long num_rows, long long cols, long long inner, long long grad_outer_stride, long long grad_inner_stride,
    long long grad_column_stride, long long x_outer_stride, long long x_inner_stride, long long x_column_stride,
    long long weight_stride) {
    // One block owns blockDim.y consecutive rows, one thread every blockDim.x-th vector of each.
    using C = Compute<T>;
    const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    C mean = 0, rstd = 0;
    if (row >= num_rows) {
        cols = 0;  // its lanes take part in sums of their warp
    } else {
        x += row_offset(row, inner, x_outer_stride, x_inner_stride);
        grad_output += row_offset(row, inner, grad_outer_stride, grad_inner_stride);
        if constexpr (MEAN) mean = mean_of[row];
        rstd = rstd_of[row];
    }
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
                const C of_normal = rounded_product(C(grads[k].at[j]), C(w.at[j]));
                if constexpr (MEAN) sums.first += of_normal;
                sums.second += of_normal * normalized<MEAN>(C(xs[k].at[j]), mean, rstd);
            }
        }
    }
    sums = sums_of_gradients<MEAN, false>(sums, 0);
    if (threadIdx.x == 0 && row < num_rows) {
        means[row] = sums.first / C(cols);
        means[num_rows + row] = sums.second / C(cols);
    }
}

template <class T, int WIDTH, bool MEAN, bool ADDED>
__global__ void __launch_bounds__(128, 3) norm_backward_columns_kernel(
    const T* __restrict__ grad_output,       // [outer, inner, cols], strided
    const T* __restrict__ x,                 // [outer, inner, cols], strided
    const T* __restrict__ weight,            // [cols], strided
    const Compute<T>* __restrict__ mean_of,  // [outer * inner], or null unless MEAN
    const Compute<T>* __restrict__ rstd_of,  // [outer * inner]
    const Compute<T>* __restrict__ means,    // [2, outer * inner]
    const T* __restrict__ added,             // [outer * inner, cols], or null unless ADDED
    T* __restrict__ grad_x,                  // [outer * inner, cols], or null where not needed
    Compute<T>* __restrict__ partial,        // [parameters, gridDim.y, cols], or null: the sums over a block's rows
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
            const C mean = MEAN ? mean_of[row] : C(0), rstd = rstd_of[row];
            const Sums<C> of_row{MEAN && grad_x ? means[row] : C(0), grad_x ? means[num_rows + row] : C(0)};
            Vector<T, WIDTH> others;
            if constexpr (ADDED) others = take<WIDTH>(added + row * cols, column, 1);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const C grad = C(grads[k].at[j]), normal = normalized<MEAN>(C(xs[k].at[j]), mean, rstd);
                grad_weight[j] += grad * normal;
                if constexpr (MEAN) grad_bias[j] += grad;
                C of_x = gradient<MEAN>(rounded_product(grad, C(w.at[j])), normal, of_row, rstd);
                if constexpr (ADDED) of_x += C(others.at[j]);
                grads[k].at[j] = T(of_x);
            }
            if (grad_x) grads[k].store(grad_x + row * cols + column);
        }
    }
    if (!partial) return;
    partial += blockIdx.y * cols + column;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        partial[j] = grad_weight[j];
        if constexpr (MEAN) partial[gridDim.y * cols + j] = grad_bias[j];
    }
}

template <class T>
__global__ void __launch_bounds__(1024) norm_sum_partials_kernel(
    const Compute<T>* __restrict__ partial,  // [gridDim.y, partials, cols]
    T* __restrict__ grad_weight,             // [cols], or null where not needed
    T* __restrict__ grad_bias,               // [cols], or null where not needed
    long long partials, long long cols) {
    // One block owns 32 columns of one gradient, one thread every blockDim.y-th partial sum of one of them.
    using C = Compute<T>;
    __shared__ C of_threads[32][32];
    T* gradient = blockIdx.y ? grad_bias : grad_weight;
    if (!gradient) return;
    const long long column = blockIdx.x * 32ll + threadIdx.x;
    partial += blockIdx.y * partials * cols;
    C sum = 0;
    if (column < cols) {
#pragma unroll 4
        for (long long i = threadIdx.y; i < partials; i += blockDim.y) sum += partial[i * cols + column];
    }
    of_threads[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= cols) return;
    for (int i = 1; i < blockDim.y; i++) sum += of_threads[i][threadIdx.x];
    gradient[column] = T(sum);
}
