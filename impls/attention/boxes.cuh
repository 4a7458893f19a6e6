// What attention's kernels for compute capability 9.0 share: tiles of boxes of 64 columns, with one line per row, that
// the copy engine (TMA) loads, and their products.
#pragma once
#include "attention/places.cuh"
#include "hopper.cuh"
#include "vectors.cuh"

// Numbers of named barriers; those of warpgroups follow one another.
enum Barrier { TURN = 1, CLEANED = 5, OWN = 6 };
constexpr float LOG2_E = 1.44269504088896340736f;

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
template <class T> __device__ inline unsigned packed(float x, float y) {
    unsigned word;
    if constexpr (IS_BFLOAT16<T>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
        memcpy(&word, &pair, sizeof word);
    } else {
        const __half2 pair = __floats2half2_rn(x, y);
        memcpy(&word, &pair, sizeof word);
    }
    return word;
}
// Rounds sums to the terms of another product: the layout in which wgmma leaves sums is that in which it takes terms.
template <class T, int TERMS>
__device__ inline void pack(unsigned (&words)[TERMS / 16][4], const float (&sums)[TERMS / 2]) {
#pragma unroll
    for (int i = 0; i < TERMS / 4; i++) words[i / 4][i % 4] = packed<T>(sums[i * 2], sums[i * 2 + 1]);
}

// The tensor map of q, k, v or a gradient: which of its axes is the outer one.
struct Heads {
    const TensorMap& map;
    bool outer;
    __device__ void load(unsigned to, unsigned barrier, int column, int head, int token) const {
        load_box(to, map, barrier, column, outer ? token : head, outer ? head : token);
    }
    // Loads a tile of so many rows and columns.
    template <int ROWS, int COLUMNS>
    __device__ void load_tile(unsigned to, unsigned barrier, int head, int token) const {
#pragma unroll 1
        for (int box = 0; box < COLUMNS / LINE; box++)
            load(to + box * ROWS * LINE_BYTES, barrier, box * LINE, head, token);
    }
};

// Begins sums = a b^T: 64 rows of a tile of A_ROWS times a tile of ROWS.
template <class T, int COLUMNS, int A_ROWS, int ROWS>
__device__ inline void multiply_transposed(float (&sums)[ROWS / 2], unsigned a, unsigned b) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; i++) {
        const unsigned box = i / 4, step = i % 4 * 32;
        wgmma<T, 0>(sums, matrix_descriptor(a + box * A_ROWS * LINE_BYTES + step, 16, SWIZZLED),
                    matrix_descriptor(b + box * ROWS * LINE_BYTES + step, 16, SWIZZLED), i > 0);
    }
    wgmma_commit();
}
// Begins sums = a b, or sums + a b: terms in registers times a tile of ROWS.
template <class T, int COLUMNS, int ROWS>
__device__ inline void multiply(float (&sums)[COLUMNS / 2], const unsigned (&a)[ROWS / 16][4], unsigned b, bool add) {
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
        wgmma<T, 1>(sums, a[i], matrix_descriptor(b + i * 16 * LINE_BYTES, ROWS * LINE_BYTES, SWIZZLED), add || i > 0);
    wgmma_commit();
}

// Clears the rows of a tile from `first` on, by so many threads: those of another sequence follow the last row of one.
// Their weights are 0, but 0 times NaN is NaN. The swizzle stays within a line, all of which becomes 0.
template <int COLUMNS, int ROWS, int THREADS>
__device__ inline void clear_rows(unsigned char* tile, int first, int thread) {
    for (int i = first * (COLUMNS / 8) + thread; i < ROWS * (COLUMNS / 8); i += THREADS) {
        const int row = i / (COLUMNS / 8), chunk = i % (COLUMNS / 8);
        *reinterpret_cast<uint4*>(tile + chunk / 8 * ROWS * LINE_BYTES + row * LINE_BYTES + chunk % 8 * 16) = uint4{};
    }
    fence_proxy_async();
}

// Writes a warpgroup's 64 rows of sums, times the factors of a thread's two rows, to rows `stride` elements apart. They
// take the place of its own rows of a tile of ROWS, which no other one reads, so that whole lines of them are written.
template <class T, int COLUMNS, int ROWS>
__device__ inline void put_rows(const float (&sums)[COLUMNS / 2], const float (&factors)[2], unsigned char* tile,
                                int share, T* to, long long stride, int own_rows, long long columns) {
    constexpr int CHUNKS = COLUMNS / 8;
    // All warps of the warpgroup have multiplied.
    sync_threads<WARPGROUP>(OWN + share);
    const int warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int line = share * 64 + warp * 16 + lane / 4 + r * 8, i = j * 4 + r * 2;
            // Swizzled, which spreads a warp's words over all banks.
            const int chunk = (j % 8 ^ line % 8) * 16 + lane % 4 * 4;
            *reinterpret_cast<unsigned*>(tile + j / 8 * ROWS * LINE_BYTES + line * LINE_BYTES + chunk) =
                packed<T>(sums[i] * factors[r], sums[i + 1] * factors[r]);
        }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * CHUNKS; i += 32) {
        const int row = warp * 16 + i / CHUNKS, line = share * 64 + row, j = i % CHUNKS;
        if (row >= own_rows || j * 8 >= columns) continue;
        const int chunk = (j % 8 ^ line % 8) * 16;
        *reinterpret_cast<uint4*>(to + row * stride + j * 8) =
            *reinterpret_cast<const uint4*>(tile + j / 8 * ROWS * LINE_BYTES + line * LINE_BYTES + chunk);
    }
}
// The same in float: four lanes write 32 adjacent bytes.
template <class T, int COLUMNS, int ROWS>
__device__ inline void put_rows(const float (&sums)[COLUMNS / 2], const float (&factors)[2], unsigned char*, int, float* to,
                                long long stride, int own_rows, long long columns) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 2) {
        const int row = threadIdx.x % WARPGROUP / 4 / 8 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
        const int column = i / 4 * 8 + threadIdx.x % 4 * 2, r = i / 2 % 2;
        if (row < own_rows && column < columns)
            *reinterpret_cast<float2*>(to + row * stride + column) = float2{sums[i] * factors[r], sums[i + 1] * factors[r]};
    }
}
