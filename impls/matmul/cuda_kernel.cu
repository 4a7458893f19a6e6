#include <mma.h>

#include <type_traits>

#include "activation.cuh"
#include "shifted.cuh"
#include "tiles.cuh"

constexpr int GROUP = 8;
constexpr int BLOCK = 256;

// Copies BYTES to shared memory, or zeros. The thread goes on meanwhile.
template <int BYTES> __device__ inline void copy_ahead(void* to, const void* from, bool there) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 ::"r"(address), "l"(from), "n"(BYTES), "r"(there ? BYTES : 0) : "memory");
}
// Ends a group of copies, and waits until all groups but the last PENDING have landed.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// a, or b transposed: [extent, terms], with any strides, whose tiles [TILE, TILE_K] a block takes one after another.
// Each row of a tile in shared memory has the numbers of one term.
template <class T, int TILE, int TILE_K, int THREADS> struct AheadOperand {
    static constexpr int WIDTH = 16 / sizeof(T), LINE = TILE + WIDTH, SIZE = TILE_K * LINE;
    static constexpr int VECTORS = TILE * TILE_K / WIDTH / THREADS;
    static_assert(VECTORS * WIDTH * THREADS == TILE * TILE_K && THREADS % TILE == 0 && THREADS % TILE_K == 0);

    const T* next;
    long long extent, terms, term_stride;
    long long step;  // from one of a thread's vectors or single numbers to the next: in further terms or positions
    int position, term;
    bool along_terms, vectors;

    __device__ AheadOperand(
        const T* __restrict__ ptr, long long first, long long extent, long long terms, long long stride,
        long long term_stride, bool along_terms, bool vectors)
        : extent(extent - first), terms(terms), term_stride(term_stride), along_terms(along_terms),
          vectors(vectors && !along_terms) {
        const int thread = int(threadIdx.x), line = this->vectors ? TILE / WIDTH : TILE;
        term = along_terms ? thread % TILE_K : thread / line;
        position = along_terms ? thread / TILE_K : thread % line * (this->vectors ? WIDTH : 1);
        step = along_terms ? THREADS / TILE_K * stride : THREADS / line * term_stride;
        next = ptr + (first + position) * stride + term * term_stride;
    }

    template <int BYTES, int COUNT, int POSITIONS, int TERMS> __device__ void copy(T* to) const {
        const T* from = next;
#pragma unroll
        for (int i = 0; i < COUNT; i++, from += step)
            copy_ahead<BYTES>(
                to + i * (POSITIONS + TERMS * LINE), from,
                position + i * POSITIONS < extent && term + i * TERMS < terms);
    }
    // Copies the next tile, with zeros beyond the end of the matrix.
    __device__ void fetch(T* shared) {
        T* to = shared + term * LINE + position;
        if (vectors) copy<16, VECTORS, 0, THREADS * WIDTH / TILE>(to);
        else if (along_terms) copy<sizeof(T), VECTORS * WIDTH, THREADS / TILE_K, 0>(to);
        else copy<sizeof(T), VECTORS * WIDTH, 0, THREADS / TILE>(to);
        next += TILE_K * term_stride;
        terms -= TILE_K;
    }
    __device__ void put(T*) const {}
};

// The same for half types, whose numbers are too short for such copies: they pass through registers.
template <class T, int TILE, int TILE_K, int THREADS> struct HalfOperand {
    static constexpr int WIDTH = 16 / sizeof(T), COUNT = TILE * TILE_K / WIDTH / THREADS;
    // Elements per row of shared memory: aligned for tensor cores, and padded so that rows begin in different banks.
    static constexpr int LINE = TILE + WIDTH, SIZE = TILE_K * LINE;
    static_assert(COUNT * WIDTH * THREADS == TILE * TILE_K);

    long long extent, terms, stride, term_stride;
    bool along_terms;  // whether neighbours along the terms, not along the extent, are read together
    bool vectors;      // whether these neighbours are adjacent and aligned to 16 bytes, and the tile is whole
    const T* next[COUNT];
    Vector<T, WIDTH> fetched[COUNT];

    __device__ HalfOperand(
        const T* __restrict__ ptr, long long first, long long extent, long long terms, long long stride,
        long long term_stride, bool along_terms, bool vectors)
        : extent(extent - first), terms(terms), stride(stride), term_stride(term_stride), along_terms(along_terms),
          vectors(vectors && first + TILE <= extent) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            next[i] = ptr + (first + place(i).position) * stride + place(i).term * term_stride;
    }

    struct Place { int position, term; };
    // The place in a tile where the thread's i-th vector begins.
    __device__ Place place(int i) const {
        const int number = int(threadIdx.x) + i * THREADS;
        if (along_terms) return {number / (TILE_K / WIDTH), number % (TILE_K / WIDTH) * WIDTH};
        return {number % (TILE / WIDTH) * WIDTH, number / (TILE / WIDTH)};
    }

    // Loads the next tile from memory to registers, with zeros beyond the end of the matrix.
    __device__ void fetch(T*) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (vectors && terms >= TILE_K) {
                fetched[i] = Vector<T, WIDTH>::load(next[i]);
            } else {
                const Place at = place(i);
                const long long there = along_terms ? (at.position < extent ? terms - at.term : 0)
                                                    : (at.term < terms ? extent - at.position : 0);
#pragma unroll
                for (int j = 0; j < WIDTH; j++)
                    fetched[i].at[j] = j < there ? next[i][j * (along_terms ? term_stride : stride)] : T(0.0f);
            }
            next[i] += TILE_K * term_stride;
        }
        terms -= TILE_K;
    }

    // Stores what was loaded from registers to shared memory, one row of it per term.
    __device__ void put(T* shared) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const Place at = place(i);
            T* to = shared + at.term * LINE + at.position;
            if (!along_terms) {
                fetched[i].store(to);
                continue;
            }
#pragma unroll
            for (int j = 0; j < WIDTH; j++) to[j * LINE] = fetched[i].at[j];
        }
    }
};

template <class T, int TILE, int TILE_K, int THREADS>
using Operand = std::conditional_t<
    sizeof(T) == 2, HalfOperand<T, TILE, TILE_K, THREADS>, AheadOperand<T, TILE, TILE_K, THREADS>>;

// The result c, [rows, columns], contiguous.
template <class T> struct Result {
    static constexpr int WIDTH = 16 / sizeof(T);
    T* __restrict__ ptr;
    long long rows, columns, activation;
    Compute<T> negative_slope;

    // Stores WIDTH neighbours of a row. Some or all of them may lie outside.
    __device__ void put(long long row, long long column, const Compute<T>* products) const {
        if (row >= rows) return;
        Vector<T, WIDTH> results;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) results.at[j] = T(activate(products[j], activation, negative_slope));
        T* to = ptr + row * columns + column;
        if (columns % WIDTH == 0 && column < columns) return results.store(to);
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
            if (column + j < columns) to[j] = results.at[j];
    }
};

// The sums of a tile in the registers of its threads: warps in WARPS_M rows, each with four rows of eight lanes.
template <class T, int TILE_M, int TILE_N, int TILE_K, int WARPS_M, int WARPS_N> struct SumsOfThreads {
    static constexpr int WIDTH = Result<T>::WIDTH, LANES_M = 4, LANES_N = 32 / LANES_M;
    static constexpr int LEFT = TILE_M + WIDTH, RIGHT = TILE_N + WIDTH;
    static constexpr int ROWS = TILE_M / WARPS_M / LANES_M, COLUMNS = TILE_N / WARPS_N / LANES_N;
    static_assert(ROWS % WIDTH == 0 && COLUMNS % WIDTH == 0);
    T at[ROWS][COLUMNS] = {};

    // Lanes that differ by 1 have the same rows, and lanes that differ by 2 the same columns: of such lanes, shared memory
    // serves two at once.
    __device__ static int first_row() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        return warp / WARPS_N * (TILE_M / WARPS_M) + (lane / 2 % 2 + lane / 16 * 2) * WIDTH;
    }
    __device__ static int first_column() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        return warp % WARPS_N * (TILE_N / WARPS_N) + (lane % 2 + lane / 4 % 4 * 2) * WIDTH;
    }

    __device__ void add(const T* left, const T* right) {
        left += first_row();
        right += first_column();
        Vector<T, WIDTH> x[2][ROWS / WIDTH], y[2][COLUMNS / WIDTH];
        const auto load = [&](int k) {
#pragma unroll
            for (int v = 0; v < ROWS / WIDTH; v++)
                x[k % 2][v] = Vector<T, WIDTH>::load(left + k * LEFT + v * LANES_M * WIDTH);
#pragma unroll
            for (int v = 0; v < COLUMNS / WIDTH; v++)
                y[k % 2][v] = Vector<T, WIDTH>::load(right + k * RIGHT + v * LANES_N * WIDTH);
        };
        load(0);
#pragma unroll
        for (int k = 0; k < TILE_K; k++) {
            if (k + 1 < TILE_K) load(k + 1);
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int column = 0; column < COLUMNS; column++) {
                    // There and back, so that successive products share a factor.
                    const int j = i % 2 ? COLUMNS - 1 - column : column;
                    at[i][j] += x[k % 2][i / WIDTH].at[i % WIDTH] * y[k % 2][j / WIDTH].at[j % WIDTH];
                }
        }
    }
    __device__ void put(const Result<T>& c, long long rows, long long columns) const {
        rows += first_row();
        columns += first_column();
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int v = 0; v < COLUMNS / WIDTH; v++)
                c.put(
                    rows + i / WIDTH * LANES_M * WIDTH + i % WIDTH, columns + v * LANES_N * WIDTH, &at[i][v * WIDTH]);
    }
};

// The sums of a tile of half types, in the tensor cores' fragments of its warps.
template <class T, int TILE, int TILE_K, int WARPS_M, int WARPS_N> struct SumsOfWarps {
    static constexpr int WARPS = WARPS_M * WARPS_N;
    static constexpr int ROWS = TILE / 16 / WARPS_M, COLUMNS = TILE / 16 / WARPS_N;
    static constexpr int LINE = Operand<T, TILE, TILE_K, WARPS * 32>::LINE;
    static_assert(ROWS * WARPS_M * 16 == TILE && COLUMNS * WARPS_N * 16 == TILE);
    nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> at[ROWS][COLUMNS];

    __device__ SumsOfWarps() {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) nvcuda::wmma::fill_fragment(at[i][j], 0.0f);
    }
    __device__ static int first_row() { return int(threadIdx.x) / 32 / WARPS_N * ROWS * 16; }
    __device__ static int first_column() { return int(threadIdx.x) / 32 % WARPS_N * COLUMNS * 16; }

    __device__ void add(const T* left, const T* right) {
        using namespace nvcuda::wmma;
#pragma unroll
        for (int k = 0; k < TILE_K; k += 16) {
            fragment<matrix_a, 16, 16, 16, T, col_major> x[ROWS];
            fragment<matrix_b, 16, 16, 16, T, row_major> y;
#pragma unroll
            for (int i = 0; i < ROWS; i++) load_matrix_sync(x[i], left + k * LINE + first_row() + i * 16, LINE);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                load_matrix_sync(y, right + k * LINE + first_column() + j * 16, LINE);
#pragma unroll
                for (int i = 0; i < ROWS; i++) mma_sync(at[i][j], x[i], y, at[i][j]);
            }
        }
    }
    __device__ void put(const Result<T>& c, long long rows, long long columns) const {
        // Which elements a lane's registers hold is unspecified, so pass them through shared memory.
        __shared__ __align__(32) float passed[WARPS][16][16];
        auto& mine = passed[threadIdx.x / 32];
        const int row = threadIdx.x % 32 / 2, column = threadIdx.x % 2 * 8;
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                nvcuda::wmma::store_matrix_sync(&mine[0][0], at[i][j], 16, nvcuda::wmma::mem_row_major);
                __syncwarp();
                const long long first = columns + first_column() + j * 16;
                c.put(rows + first_row() + i * 16 + row, first + column, &mine[row][column]);
                __syncwarp();
            }
    }
};

template <class T, int TILE_M, int TILE_N, int TILE_K, int WARPS_M, int WARPS_N> struct SumsOf {
    using type = SumsOfThreads<T, TILE_M, TILE_N, TILE_K, WARPS_M, WARPS_N>;
};
template <int TILE, int TILE_K, int WARPS_M, int WARPS_N>
struct SumsOf<__half, TILE, TILE, TILE_K, WARPS_M, WARPS_N> {
    using type = SumsOfWarps<__half, TILE, TILE_K, WARPS_M, WARPS_N>;
};
template <int TILE, int TILE_K, int WARPS_M, int WARPS_N>
struct SumsOf<__nv_bfloat16, TILE, TILE, TILE_K, WARPS_M, WARPS_N> {
    using type = SumsOfWarps<__nv_bfloat16, TILE, TILE_K, WARPS_M, WARPS_N>;
};

// IN_PARTS: where there are few tiles, several blocks share each, as in the kernel for Hopper.
template <class T, int TILE_M, int TILE_N, int TILE_K, int WARPS_M, int WARPS_N, int BLOCKS, int STAGES, bool IN_PARTS>
__global__ void __launch_bounds__(WARPS_M * WARPS_N * 32, BLOCKS) matmul_kernel(
    const T* __restrict__ a,  // [m, k], strided
    const T* __restrict__ b,  // [k, n], strided
    T* __restrict__ c,        // [m, n]; [parts, m, n] if IN_PARTS
    long long m, long long n, long long k, long long a_row_stride, long long a_column_stride, long long b_row_stride,
    long long b_column_stride, bool a_vectors, bool b_vectors, long long parts, long long activation,
    double negative_slope) {
    // One block owns a part of a tile [TILE_M, TILE_N] of the result.
    constexpr int THREADS = WARPS_M * WARPS_N * 32;
    using Left = Operand<T, TILE_M, TILE_K, THREADS>;
    using Right = Operand<T, TILE_N, TILE_K, THREADS>;
    extern __shared__ __align__(32) unsigned char tiles[];
    T(*left)[Left::SIZE] = reinterpret_cast<T(*)[Left::SIZE]>(tiles);
    T(*right)[Right::SIZE] = reinterpret_cast<T(*)[Right::SIZE]>(left + STAGES);
    const int tiles_m = int((m + TILE_M - 1) / TILE_M), tiles_n = int((n + TILE_N - 1) / TILE_N);
    const TileAt tile = tile_at(int(blockIdx.x) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP);
    const long long first_row = tile.row * (long long)TILE_M, first_column = tile.column * (long long)TILE_N;
    if constexpr (IN_PARTS) {
        const long long part = int(blockIdx.x) / (tiles_m * tiles_n), steps = (k + TILE_K - 1) / TILE_K;
        const long long first = part * steps / parts * TILE_K, last = (part + 1) * steps / parts * TILE_K;
        a += first * a_column_stride;
        b += first * b_row_stride;
        c += part * m * n;
        k = (last < k ? last : k) - first;
    }
    Left rows(
        a, first_row, m, k, a_row_stride, a_column_stride, a_column_stride == 1 || a_row_stride != 1, a_vectors);
    Right columns(
        b, first_column, n, k, b_column_stride, b_row_stride, b_column_stride != 1 && b_row_stride == 1, b_vectors);
    typename SumsOf<T, TILE_M, TILE_N, TILE_K, WARPS_M, WARPS_N>::type sums;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        if (stage * TILE_K < k) {
            rows.fetch(left[stage]);
            columns.fetch(right[stage]);
        }
        commit_copies();
    }
    const int steps = int((k + TILE_K - 1) / TILE_K);
    for (int step = 0, stage = 0, filled = STAGES - 1; step < steps; step++) {
        rows.put(left[stage]);
        columns.put(right[stage]);
        wait_copies<STAGES - 2>();
        // A thread that passes has multiplied the tile that is overwritten next.
        __syncthreads();
        if (step + STAGES - 1 < steps) {
            // These tiles are on their way while the present one is multiplied.
            rows.fetch(left[filled]);
            columns.fetch(right[filled]);
        }
        commit_copies();
        sums.add(left[stage], right[stage]);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        filled = filled + 1 == STAGES ? 0 : filled + 1;
    }
    sums.put(
        Result<T>{c, m, n, IN_PARTS ? NONE : activation, Compute<T>(negative_slope)}, first_row, first_column);
}

template <class T>
__global__ void __launch_bounds__(BLOCK) sum_of_parts_kernel(
    const Compute<T>* __restrict__ sums,  // [parts, m, n]
    T* __restrict__ c,                    // [m, n]
    long long elements, long long parts, long long activation, double negative_slope) {
    // One thread owns an element.
    const long long at = blockIdx.x * (long long)BLOCK + threadIdx.x;
    if (at >= elements) return;
    Compute<T> sum = sums[at];
#pragma unroll 4
    for (long long part = 1; part < parts; part++) sum += sums[part * elements + at];
    c[at] = T(activate(sum, activation, Compute<T>(negative_slope)));
}

// Vectors of a row that a thread copies.
constexpr int COPIED = 4;

// A matrix that is copied to rows of `pitch` elements.
template <class T> struct Copied {
    const T* from;  // [rows, columns], strided
    T* to;          // [rows, pitch]
    long long rows, columns, row_stride, column_stride, pitch;
};

template <class T>
__global__ void __launch_bounds__(BLOCK) copy_rows_kernel(
    const T* __restrict__ output,  // [rows, columns], or null: the first copy is the gradient through its activation
    long long activation, double negative_slope,
    const T* __restrict__ from, T* __restrict__ to,
    long long rows, long long columns, long long row_stride, long long column_stride, long long pitch,
    const T* __restrict__ from_1, T* __restrict__ to_1,
    long long rows_1, long long columns_1, long long row_stride_1, long long column_stride_1, long long pitch_1,
    const T* __restrict__ from_2, T* __restrict__ to_2,
    long long rows_2, long long columns_2, long long row_stride_2, long long column_stride_2, long long pitch_2) {
    // One warp owns 32 * COPIED consecutive vectors of a row of a copy, the blockIdx.y-th.
    using C = Compute<T>;
    constexpr int WIDTH = 16 / sizeof(T);
    Copied<T> copy{from, to, rows, columns, row_stride, column_stride, pitch};
    if (blockIdx.y == 1) copy = {from_1, to_1, rows_1, columns_1, row_stride_1, column_stride_1, pitch_1};
    if (blockIdx.y == 2) copy = {from_2, to_2, rows_2, columns_2, row_stride_2, column_stride_2, pitch_2};
    const long long vectors = copy.pitch / WIDTH, in_row = (vectors + 32 * COPIED - 1) / (32 * COPIED);
    const long long warp = blockIdx.x * (long long)blockDim.y + threadIdx.y, row = warp / in_row;
    if (row >= copy.rows) return;
    const int first = int(warp % in_row) * 32 * COPIED + int(threadIdx.x);
    const auto number = [&](int i) { return first + i * 32; };
    Vector<T, WIDTH> copied[COPIED];
    const T* source = copy.from + row * copy.row_stride;
    if (copy.column_stride == 1) {
        load_shifted<T, WIDTH, COPIED>(copied, source, copy.columns, number, 0.0f);
    } else {
#pragma unroll
        for (int i = 0; i < COPIED; i++)
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const long long column = number(i) * (long long)WIDTH + j;
                copied[i].at[j] = column < copy.columns ? source[column * copy.column_stride] : T(0.0f);
            }
    }
    if (output && blockIdx.y == 0) {
        Vector<T, WIDTH> outputs[COPIED];
        load_shifted<T, WIDTH, COPIED>(outputs, output + row * columns, columns, number, 0.0f);
#pragma unroll
        for (int i = 0; i < COPIED; i++)
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                copied[i].at[j] =
                    T(activation_backward(C(copied[i].at[j]), C(outputs[i].at[j]), activation, C(negative_slope)));
    }
#pragma unroll
    for (int i = 0; i < COPIED; i++)
        if (number(i) < vectors) copied[i].store(copy.to + row * copy.pitch + number(i) * (long long)WIDTH);
}
