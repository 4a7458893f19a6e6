// For compute capability 9.0 only: wgmma on float16 copies of both matrices, whose tiles the copy engine (TMA) loads.
#include "hopper.cuh"
#include "tiles.cuh"
#include "vectors.cuh"

// Terms that share a scale of a, and of b; columns of the result that share a scale of b; rows of a tile.
constexpr int BLOCK = 128;
// Warpgroups of 128 threads: one loads tiles, two multiply 64 rows of a tile each.
constexpr int MULTIPLYING = 2, THREADS = WARPGROUP * (1 + MULTIPLYING);
// Rows of tiles that are walked column by column, so that inputs stay in the cache.
constexpr int GROUP = 8;
// A box is a line of each of 128 rows. Two of them, 128 terms of 128 rows, are a stage.
constexpr int BOX_BYTES = BLOCK * LINE_BYTES, STAGE_BYTES = BLOCK / LINE * BOX_BYTES;

// Begins sums = a b^T: 64 rows of a stage times one.
__device__ inline void multiply(float (&sums)[BLOCK / 2], unsigned a, unsigned b) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK / 16; i++) {
        const unsigned at = i / 4 * BOX_BYTES + i % 4 * 32;
        wgmma<__half, 0>(sums, matrix_descriptor(a + at, 16, SWIZZLED), matrix_descriptor(b + at, 16, SWIZZLED), i > 0);
    }
    wgmma_commit();
}

// Stores a thread's sums: in two rows, two of every 8 of 128 columns. Neighbouring lanes exchange pairs,
// so that each has 4 columns in one row.
template <class T>
__device__ inline void store_sums(const float (&sums)[BLOCK / 2], T* __restrict__ c, long long row, long long column,
                                  long long m, long long n) {
    const bool odd = threadIdx.x % 2;
    row += odd ? 8 : 0, column += threadIdx.x % 4 / 2 * 4;
#pragma unroll
    for (int i = 0; i < BLOCK / 2; i += 4, column += 8) {
        Vector<T, 4> results;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            // As values: a choice between two places would move all sums to local memory.
            const float first = sums[i + e], second = sums[i + 2 + e];
            const float other = __shfl_xor_sync(~0u, odd ? first : second, 1);
            results.at[e] = T(odd ? other : first);
            results.at[2 + e] = T(odd ? second : other);
        }
        if (row >= m) continue;
        T* to = c + row * n + column;
        if (n % 4 == 0 && column < n) {
            results.store(to);
            continue;
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (column + e < n) to[e] = results.at[e];
    }
}

template <class T, int ACROSS, int STAGES>
__global__ void __launch_bounds__(THREADS, 1) scaled_matmul_hopper_kernel(
    const __grid_constant__ TensorMap a_map,  // of [lines, m, 64], with an even number of lines
    const __grid_constant__ TensorMap b_map,  // of [lines, n, 64]
    const float* __restrict__ scale_a,        // [m, lines / 2], strided
    const float* __restrict__ scale_b,        // [ceil(n / BLOCK), lines / 2], strided
    T* __restrict__ c,                        // [m, n]
    long long m, long long n, long long lines, long long scale_a_row_stride, long long scale_a_column_stride,
    long long scale_b_row_stride, long long scale_b_column_stride) {
    // One block owns every gridDim.x-th tile of 128 rows and ACROSS blocks of columns.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char raw[];
    const unsigned base = (shared_address(raw) + SWIZZLED - 1) / SWIZZLED * SWIZZLED;
    const unsigned full = base + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    // The shuffle tells the compiler that the value is the same in all of a warp.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full + stage * 8, 1);
            // Each multiplying warp reports by itself that it is done with a stage.
            barrier_init(empty + stage * 8, MULTIPLYING * WARPGROUP / 32);
        }
        fence_mbarrier_init();
        prefetch(a_map);
        prefetch(b_map);
    }
    __syncthreads();

    const int tiles_m = int((m + BLOCK - 1) / BLOCK), blocks_n = int((n + BLOCK - 1) / BLOCK);
    const int tiles_n = (blocks_n + ACROSS - 1) / ACROSS, blocks = int(lines / 2);
    Turn<STAGES> turn;

    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x != 0) return;
        for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
            const TileAt at = tile_at(tile, tiles_m, tiles_n, GROUP);
            for (int block = 0; block < blocks; block++) {
                for (int side = 0; side <= ACROSS; side++, turn.next()) {
                    const unsigned here = base + turn.stage * STAGE_BYTES, barrier = full + turn.stage * 8;
                    // A stage that was never used counts as empty, because the phase before the first has ended.
                    barrier_wait(empty + turn.stage * 8, turn.parity ^ 1);
                    barrier_arrive_expecting(barrier, STAGE_BYTES);
                    const int row = (side ? at.column * ACROSS + side - 1 : at.row) * BLOCK;
                    load_box(here, side ? b_map : a_map, barrier, 0, row, block * 2);
                }
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int share = warpgroup - 1, thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    // Of a warpgroup's 64 rows, a thread has one in each half of its warp's 16 rows, and two of every 8 columns.
    const int row_here = share * 64 + thread / 32 * 16 + lane / 4;
    for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
        const TileAt at = tile_at(tile, tiles_m, tiles_n, GROUP);
        const long long row = at.row * (long long)BLOCK + row_here;
        // Rows and blocks of columns past the end, which are not stored, take the last ones' scales.
        const float* of_row[2] = {scale_a + min(row, m - 1) * scale_a_row_stride,
                                  scale_a + min(row + 8, m - 1) * scale_a_row_stride};
        const float* of_column = scale_b + (long long)at.column * ACROSS * scale_b_row_stride;
        const long long next_column = min(blocks_n - 1 - at.column * ACROSS, 1) * scale_b_row_stride;
        float total[ACROSS][BLOCK / 2];
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
#pragma unroll
            for (int i = 0; i < BLOCK / 2; i++) total[j][i] = 0;
        for (int block = 0; block < blocks; block++) {
            const unsigned left = turn.stage;
            float sums[BLOCK / 2], of_rows[2], of_columns[ACROSS];
            barrier_wait(full + left * 8, turn.parity);
            turn.next();
#pragma unroll
            for (int j = 0; j < ACROSS; j++, turn.next()) {
                barrier_wait(full + turn.stage * 8, turn.parity);
                multiply(sums, base + left * STAGE_BYTES + share * 64 * LINE_BYTES, base + turn.stage * STAGE_BYTES);
                // Scales are loaded while the tensor cores multiply.
                if (j == 0) {
#pragma unroll
                    for (int r = 0; r < 2; r++) of_rows[r] = *of_row[r], of_row[r] += scale_a_column_stride;
#pragma unroll
                    for (int i = 0; i < ACROSS; i++) of_columns[i] = of_column[i * next_column];
                    of_column += scale_b_column_stride;
                }
                wgmma_wait<0>();
                wgmma_written(sums);
                if (lane == 0) {
                    barrier_arrive(empty + turn.stage * 8);
                    if (j == ACROSS - 1) barrier_arrive(empty + left * 8);
                }
                const float scales[2] = {of_rows[0] * of_columns[j], of_rows[1] * of_columns[j]};
#pragma unroll
                for (int i = 0; i < BLOCK / 2; i++) total[j][i] += sums[i] * scales[i / 2 % 2];
            }
        }
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
            store_sums(total[j], c, row, (at.column * ACROSS + j) * (long long)BLOCK, m, n);
    }
#endif
}
