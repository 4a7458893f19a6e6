#include <mma.h>

#include <type_traits>

#include "scaled_matmul/quantised.cuh"
#include "tiles.cuh"
#include "vectors.cuh"

// Terms that share a scale of a, and of b, and columns of the result that share a scale of b.
constexpr int BLOCK = 128;
// What rows of shared memory are padded with, so that they begin in different banks.
constexpr int PADDING = 8;
// Rows of tiles that are walked column by column, so that inputs stay in the cache.
constexpr int GROUP = 8;
constexpr int FRAGMENT = 16;
// What has a scale: nothing, each block of terms of a row of a and of 128 columns, or each row of a and each column.
enum Scaled { NOTHING, BLOCKS, ROWS };

// Loads 16 neighbours of a row: the first `there` of them, then zeros.
__device__ inline uint4 fetched(const unsigned char* from, long long term_stride, long long there, bool vectors) {
    if (vectors && there >= 16) return *reinterpret_cast<const uint4*>(from);
    unsigned long long bits[2] = {};
    // All 16 loads at once would take more registers than there are.
#pragma unroll 2
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (j + half * 8 < there) bits[half] |= (unsigned long long)from[(j + half * 8) * term_stride] << j * 8;
    uint4 words;
    memcpy(&words, bits, sizeof words);
    return words;
}

// a, or b: [extent, terms], with any strides. Its numbers are of a type, or of either type of float8.
template <int TILE, int STEP, int THREADS, int TYPE> struct Side {
    static constexpr int WIDTH = 16, LINE = STEP + PADDING, COUNT = TILE * STEP / WIDTH / THREADS;
    static_assert(COUNT * WIDTH * THREADS == TILE * STEP);
    using Fetched = uint4[COUNT];

    const unsigned char* __restrict__ ptr;
    long long extent, terms, stride, term_stride;
    bool vectors;  // whether terms are adjacent, and rows begin at multiples of 16 bytes
    bool e5m2;     // of EITHER_FLOAT8, whether it is float8_e5m2

    __device__ static int row(int i) { return (int(threadIdx.x) + i * THREADS) / (STEP / WIDTH); }
    __device__ static int term(int i) { return (int(threadIdx.x) + i * THREADS) % (STEP / WIDTH) * WIDTH; }

    // Loads from memory to registers, with zeros beyond the end of the matrix.
    __device__ void fetch(Fetched& fetched, long long first, long long start) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const long long position = first + row(i), begin = start + term(i);
            const unsigned char* from = ptr + position * stride + begin * term_stride;
            const long long there = position < extent ? terms - begin : 0;
            fetched[i] = ::fetched(from, term_stride, there, vectors);
        }
    }

    // Converts, and stores from registers to shared memory, one row of it per row.
    __device__ void put(const Fetched& fetched, __half* shared) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const uint4 bits = fetched[i];
            uint4* to = reinterpret_cast<uint4*>(shared + row(i) * LINE + term(i));
            to[0] = make_uint4(pair(bits.x), pair(bits.x >> 16), pair(bits.y), pair(bits.y >> 16));
            to[1] = make_uint4(pair(bits.z), pair(bits.z >> 16), pair(bits.w), pair(bits.w >> 16));
        }
    }
    // Two numbers as two of float16: see decoded.
    __device__ unsigned pair(unsigned two) const {
        if constexpr (TYPE != EITHER_FLOAT8) return decoded<TYPE>(two);
        const unsigned e4m3 = decoded<E4M3>(two), wide = decoded<E5M2>(two);
        return e5m2 ? wide : e4m3;
    }
};

// The scale of each row of a tile in one block of terms, and of its columns, which share one.
template <int TILE, int THREADS> struct Scales {
    static constexpr int WIDTH = 4, COUNT = TILE * FRAGMENT / WIDTH / THREADS;
    static_assert(COUNT * WIDTH * THREADS == TILE * FRAGMENT);
    using Fetched = float[COUNT];

    const float* __restrict__ of_rows;
    const float* __restrict__ of_columns;
    long long rows, row_stride, row_term_stride, column_term_stride;

    __device__ static int row(int i) { return (int(threadIdx.x) + i * THREADS) / (FRAGMENT / WIDTH); }

    __device__ void fetch(Fetched& fetched, long long first, long long block) const {
        const float of_column = of_columns[block * column_term_stride];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const long long position = first + row(i);
            fetched[i] =
                position < rows ? of_rows[position * row_stride + block * row_term_stride] * of_column : 0.0f;
        }
    }

    // Stores each scale as often as a fragment has columns, so that it is loaded as a fragment.
    __device__ static void put(const Fetched& fetched, float* shared) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float scale = fetched[i];
            const int at = (int(threadIdx.x) + i * THREADS) * WIDTH;
            *reinterpret_cast<float4*>(shared + at) = make_float4(scale, scale, scale, scale);
        }
    }
};

// The bits of a total as those of a float, and the total of such bits.
__device__ inline float bits_of(float total) { return total; }
__device__ inline float bits_of(int total) { return __int_as_float(total); }
template <class Total> __device__ Total of_bits(float bits) {
    if constexpr (std::is_same_v<Total, int>) return __float_as_int(bits);
    else return bits;
}

// The result c, [rows, columns], contiguous. Its sums are of type Total.
template <class T, Scaled SCALED, class Total> struct Result {
    static constexpr int WIDTH = 16 / sizeof(T);
    T* __restrict__ ptr;
    long long rows, columns;
    const float* __restrict__ of_rows;
    const float* __restrict__ of_columns;
    long long row_stride, column_stride;

    // Stores 8 neighbours of a row. Some or all of them may lie outside.
    __device__ void put(long long row, long long column, const float* sums) const {
        if (row >= rows) return;
        float scale = 1;
        if constexpr (SCALED == ROWS) scale = of_rows[row * row_stride];
#pragma unroll
        for (int begin = 0; begin < 8; begin += WIDTH) {
            Vector<T, WIDTH> results;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const Total total = of_bits<Total>(sums[begin + j]);
                if constexpr (SCALED == ROWS) {
                    // Columns past the end, which are not stored, take the last one's scale.
                    const long long here = min(column + begin + j, columns - 1);
                    results.at[j] = T(float(total) * (scale * of_columns[here * column_stride]));
                } else {
                    results.at[j] = T(total);
                }
            }
            const long long at = column + begin;
            T* to = ptr + row * columns + at;
            if (columns % WIDTH == 0 && at < columns) {
                results.store(to);
                continue;
            }
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                if (at + j < columns) to[j] = results.at[j];
        }
    }
};

// The sums of a tile, in the tensor cores' fragments of its warps: of the present block of terms, and of all before it.
// The tensor cores multiply float16 numbers exactly and add up in float32, which holds the sum of any block of int8
// numbers; int32 then holds the total. Those of float8 numbers keep 14 bits on Hopper.
template <class Total, int TILE_M, int TILE_N, int THREADS> struct Sums {
    static constexpr int WARPS = THREADS / 32, WARPS_M = (WARPS + 1) / 2, WARPS_N = WARPS / WARPS_M;
    static constexpr int ROWS = TILE_M / FRAGMENT / WARPS_M, COLUMNS = TILE_N / FRAGMENT / WARPS_N;
    // Terms of a step. A small tile takes a whole block of them, because each step waits once for memory.
    static constexpr int STEP = TILE_M + TILE_N > BLOCK ? BLOCK / 2 : BLOCK, LINE = STEP + PADDING;
    static_assert(ROWS * WARPS_M * FRAGMENT == TILE_M && COLUMNS * WARPS_N * FRAGMENT == TILE_N);
    using Fragment = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, FRAGMENT, FRAGMENT, FRAGMENT, float>;
    Fragment of_block[ROWS][COLUMNS];
    Total total[ROWS][COLUMNS][Fragment::num_elements];

    __device__ Sums() {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                nvcuda::wmma::fill_fragment(of_block[i][j], 0.0f);
#pragma unroll
                for (int e = 0; e < Fragment::num_elements; e++) total[i][j][e] = 0;
            }
    }
    __device__ static int first_row() { return int(threadIdx.x) / 32 / WARPS_N * ROWS * FRAGMENT; }
    __device__ static int first_column() { return int(threadIdx.x) / 32 % WARPS_N * COLUMNS * FRAGMENT; }

    __device__ void add(const __half* left, const __half* right) {
        using namespace nvcuda::wmma;
#pragma unroll
        for (int k = 0; k < STEP; k += FRAGMENT) {
            fragment<matrix_a, FRAGMENT, FRAGMENT, FRAGMENT, __half, row_major> x[ROWS];
            fragment<matrix_b, FRAGMENT, FRAGMENT, FRAGMENT, __half, col_major> y;
#pragma unroll
            for (int i = 0; i < ROWS; i++) load_matrix_sync(x[i], left + (first_row() + i * FRAGMENT) * LINE + k, LINE);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                load_matrix_sync(y, right + (first_column() + j * FRAGMENT) * LINE + k, LINE);
#pragma unroll
                for (int i = 0; i < ROWS; i++) mma_sync(of_block[i][j], x[i], y, of_block[i][j]);
            }
        }
    }

    // Ends a block of terms. Fragments of one kind hold their elements in the same places, so scales meet their rows.
    template <bool SCALED> __device__ void promote(const float* scales) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            Fragment scale;
            const float* from = scales + (first_row() + i * FRAGMENT) * FRAGMENT;
            if constexpr (SCALED)
                nvcuda::wmma::load_matrix_sync(scale, from, FRAGMENT, nvcuda::wmma::mem_row_major);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
#pragma unroll
                for (int e = 0; e < Fragment::num_elements; e++) {
                    const float sum = of_block[i][j].x[e];
                    if constexpr (SCALED) total[i][j][e] += sum * scale.x[e];
                    else total[i][j][e] += Total(sum);
                }
                nvcuda::wmma::fill_fragment(of_block[i][j], 0.0f);
            }
        }
    }

    // Which elements a lane's registers hold is unspecified, so pass their bits through shared memory, 256 numbers per
    // warp.
    template <class ResultOf>
    __device__ void put(const ResultOf& c, long long rows, long long columns, float* passed) {
        float* mine = passed + threadIdx.x / 32 * FRAGMENT * FRAGMENT;
        const int row = threadIdx.x % 32 / 2, column = threadIdx.x % 2 * 8;
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
#pragma unroll
                for (int e = 0; e < Fragment::num_elements; e++) of_block[i][j].x[e] = bits_of(total[i][j][e]);
                nvcuda::wmma::store_matrix_sync(mine, of_block[i][j], FRAGMENT, nvcuda::wmma::mem_row_major);
                __syncwarp();
                const long long first = columns + first_column() + j * FRAGMENT;
                c.put(rows + first_row() + i * FRAGMENT + row, first + column, mine + row * FRAGMENT + column);
                __syncwarp();
            }
    }
};

template <class T, int TILE_M, int TILE_N, int THREADS, Scaled SCALED, int TYPE, class Total>
__global__ void __launch_bounds__(THREADS) scaled_matmul_kernel(
    const unsigned char* __restrict__ a,  // of TYPE, [m, k], strided
    const unsigned char* __restrict__ b,  // of TYPE, [n, k], strided
    const float* __restrict__ scale_a,    // [m, ceil(k / BLOCK)], strided; [m] if of ROWS
    const float* __restrict__ scale_b,    // [ceil(n / BLOCK), ceil(k / BLOCK)], strided; [n] if of ROWS
    T* __restrict__ c,                    // [m, n], or [parts, m, n]: the sums over each part of the terms
    long long m, long long n, long long k, long long a_row_stride, long long a_column_stride, long long b_row_stride,
    long long b_column_stride, long long scale_a_row_stride, long long scale_a_column_stride,
    long long scale_b_row_stride, long long scale_b_column_stride, bool a_vectors, bool b_vectors,
    bool a_e5m2, bool b_e5m2, long long parts) {
    // One block owns a tile [TILE_M, TILE_N] of the result, whose columns share a scale of each of the BLOCKS of terms, or
    // its sums over one of the parts of the terms.
    using OfSums = Sums<Total, TILE_M, TILE_N, THREADS>;
    constexpr int STEP = OfSums::STEP, LINE = OfSums::LINE;
    static_assert(BLOCK % TILE_N == 0 && BLOCK % STEP == 0);
    __shared__ __align__(32) __half left[TILE_M * LINE], right[TILE_N * LINE];
    __shared__ __align__(32) float scales[TILE_M * FRAGMENT];
    const int tiles_m = int((m + TILE_M - 1) / TILE_M), tiles_n = int((n + TILE_N - 1) / TILE_N);
    const TileAt tile = tile_at(int(blockIdx.x) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP);
    const long long part = int(blockIdx.x) / (tiles_m * tiles_n), blocks = (k + BLOCK - 1) / BLOCK;
    const long long begin = part * blocks / parts * BLOCK, end = min(k, (part + 1) * blocks / parts * BLOCK);
    const long long first_row = tile.row * (long long)TILE_M, first_column = tile.column * (long long)TILE_N;

    using Left = Side<TILE_M, STEP, THREADS, TYPE>;
    using Right = Side<TILE_N, STEP, THREADS, TYPE>;
    using OfTile = Scales<TILE_M, THREADS>;
    const Left of_a{a, m, k, a_row_stride, a_column_stride, a_vectors, a_e5m2};
    const Right of_b{b, n, k, b_row_stride, b_column_stride, b_vectors, b_e5m2};
    const float* of_columns = scale_b + first_column / BLOCK * scale_b_row_stride;
    const OfTile of_tile{scale_a, of_columns, m, scale_a_row_stride, scale_a_column_stride, scale_b_column_stride};
    OfSums sums;
    // Nothing is multiplied by a warp all of whose rows, or columns, lie outside.
    const bool within = first_row + sums.first_row() < m && first_column + sums.first_column() < n;
    typename Left::Fetched next_left;
    typename Right::Fetched next_right;
    typename OfTile::Fetched next_scales;
    if (begin < end) {
        of_a.fetch(next_left, first_row, begin);
        of_b.fetch(next_right, first_column, begin);
        if constexpr (SCALED == BLOCKS) of_tile.fetch(next_scales, first_row, begin / BLOCK);
    }
    for (long long start = begin; start < end; start += STEP) {
        const long long next = start + STEP;
        const bool ends_block = next % BLOCK == 0 || next >= end;
        of_a.put(next_left, left);
        of_b.put(next_right, right);
        if (SCALED == BLOCKS && ends_block) OfTile::put(next_scales, scales);
        __syncthreads();
        if (next < end) {
            // These loads are in flight while the present tile is multiplied.
            of_a.fetch(next_left, first_row, next);
            of_b.fetch(next_right, first_column, next);
            if (SCALED == BLOCKS && ends_block) of_tile.fetch(next_scales, first_row, next / BLOCK);
        }
        if (within) sums.add(left, right);
        if (ends_block) sums.template promote<SCALED == BLOCKS>(scales);
        __syncthreads();
    }
    static_assert(sizeof(float) * FRAGMENT * FRAGMENT * (THREADS / 32) <= sizeof left);
    using OfC = Result<T, SCALED, Total>;
    const OfC of_c{c + part * m * n, m, n, scale_a, scale_b, scale_a_row_stride, scale_b_row_stride};
    sums.put(of_c, first_row, first_column, reinterpret_cast<float*>(left));
}

template <class T>
__global__ void __launch_bounds__(256) scaled_sum_of_parts_kernel(
    const int* __restrict__ sums,       // [parts, m, n]
    const float* __restrict__ scale_a,  // [m], strided
    const float* __restrict__ scale_b,  // [n], strided
    T* __restrict__ c,                  // [m, n]
    long long m, long long n, long long parts, long long scale_a_stride, long long scale_b_stride) {
    // One block owns up to blockDim.x columns of a row, one thread one of them.
    const unsigned blocks = (unsigned)((n + blockDim.x - 1) / blockDim.x), row = blockIdx.x / blocks;
    const long long column = (long long)(blockIdx.x - row * blocks) * blockDim.x + threadIdx.x;
    if (column >= n) return;
    const float scale = scale_a[row * scale_a_stride] * scale_b[column * scale_b_stride];
    int sum = 0;
#pragma unroll 4
    for (long long part = 0; part < parts; part++) sum += sums[(part * m + row) * n + column];
    c[row * n + column] = T(float(sum) * scale);
}

template <int TYPE>
__global__ void to_float16_kernel(
    const unsigned char* __restrict__ b,  // of TYPE, [n, k], strided
    __half* __restrict__ to,              // [n, terms], with zeros beyond k
    long long k, long long terms, long long row_stride, long long column_stride, bool vectors) {
    // One block owns a row; one thread every blockDim.x-th 16 numbers of it. Their order is that in which a thread has
    // terms of the left matrix: 4 adjacent ones are two of the first 8, and two of the others.
    for (long long at = threadIdx.x * 16; at < terms; at += blockDim.x * 16) {
        const unsigned char* from = b + blockIdx.x * row_stride + at * column_stride;
        const uint4 bits = fetched(from, column_stride, k - at, vectors);
        uint4* put = reinterpret_cast<uint4*>(to + blockIdx.x * terms + at);
        put[0] = make_uint4(decoded<TYPE>(bits.x), decoded<TYPE>(bits.y), decoded<TYPE>(bits.z), decoded<TYPE>(bits.w));
        put[1] = make_uint4(decoded<TYPE>(bits.x >> 16), decoded<TYPE>(bits.y >> 16), decoded<TYPE>(bits.z >> 16),
                            decoded<TYPE>(bits.w >> 16));
    }
}
