// For compute capability 9.0 only: wgmma on int8 numbers, whose tiles the copy engine (TMA) loads.
#include "hopper.cuh"
#include "scaled_matmul/results.cuh"
#include "tiles.cuh"

// Rows of a tile; terms of a stage, a line of each row; and terms of one wgmma.
constexpr int TILE_M = 128, TERMS = LINE_BYTES, STEP = 32;
// Warpgroups of 128 threads: one loads tiles, two multiply 64 rows of a tile each.
constexpr int MULTIPLYING = TILE_M / 64, THREADS = WARPGROUP * (1 + MULTIPLYING);
// Rows of tiles that are walked column by column, so that inputs stay in the cache.
constexpr int GROUP = 8;
// Columns that a warpgroup stores at a time.
constexpr int STORED = 64;

template <class T, int TILE_N, int STAGES>
__global__ void __launch_bounds__(THREADS, 1) int8_matmul_hopper_kernel(
    const __grid_constant__ TensorMap a_map,  // of int8 [m, terms], in elements of 2 bytes
    const __grid_constant__ TensorMap b_map,  // of int8 [n, terms], in elements of 2 bytes
    const float* __restrict__ scale_a,        // [m], strided
    const float* __restrict__ scale_b,        // [n], strided
    T* __restrict__ c,                        // [m, n]
    long long m, long long n, long long terms, long long scale_a_stride, long long scale_b_stride) {
    // One block owns every gridDim.x-th tile [TILE_M, TILE_N] of the result.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int A_BYTES = TILE_M * LINE_BYTES, STAGE_BYTES = A_BYTES + TILE_N * LINE_BYTES;
    extern __shared__ unsigned char raw[];
    const unsigned base = (shared_address(raw) + SWIZZLED - 1) / SWIZZLED * SWIZZLED;
    const unsigned full = base + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    // The shuffle tells the compiler that the value is the same in all of a warp.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0) {
        init_ring<STAGES>(full, empty, MULTIPLYING * WARPGROUP / 32);
        fence_mbarrier_init();
        prefetch(a_map);
        prefetch(b_map);
    }
    __syncthreads();

    const int tiles_m = int((m + TILE_M - 1) / TILE_M), tiles_n = int((n + TILE_N - 1) / TILE_N);
    const int steps = int((terms + TERMS - 1) / TERMS);
    Turn<STAGES> turn;

    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 0) return;
        for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
            const TileAt at = tile_at(tile, tiles_m, tiles_n, GROUP);
            for (int step = 0; step < steps; step++, turn.next()) {
                const unsigned here = base + turn.stage * STAGE_BYTES, barrier = full + turn.stage * 8;
                // A stage that was never used counts as empty, because the phase before the first has ended.
                barrier_wait(empty + turn.stage * 8, turn.parity ^ 1);
                barrier_arrive_expecting(barrier, STAGE_BYTES);
                load_box(here, a_map, barrier, step * LINE, at.row * TILE_M);
                load_box(here + A_BYTES, b_map, barrier, step * LINE, at.column * TILE_N);
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int share = warpgroup - 1, thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    // Of a warpgroup's 64 rows, a thread has one in each half of its warp's 16 rows, and two of every 8 columns.
    const int row_here = share * 64 + thread / 32 * 16 + lane / 4;
    int sums[TILE_N / 2];
    for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
        const TileAt at = tile_at(tile, tiles_m, tiles_n, GROUP);
        int before = 0;
        // One copy of the loop's body is enough: the products take longer than all else.
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            barrier_wait(full + turn.stage * 8, turn.parity);
            const unsigned b = base + turn.stage * STAGE_BYTES + A_BYTES, a = b - A_BYTES + share * 64 * LINE_BYTES;
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < TERMS; i += STEP)
                wgmma_int8(sums, matrix_descriptor(a + i, 16, SWIZZLED), matrix_descriptor(b + i, 16, SWIZZLED),
                           step > 0 || i > 0);
            wgmma_commit();
            // The tensor cores stay busy with this step while the stage of the step before is released.
            wgmma_wait<1>();
            if (step > 0 && lane == 0) barrier_arrive(empty + before * 8);
            before = turn.stage;
            turn.next();
        }
        wgmma_wait<0>();
        wgmma_written(sums);
        if (lane == 0) barrier_arrive(empty + before * 8);

        // Rows and columns past the end, which are not stored, take the last ones' scales.
        const long long row = at.row * (long long)TILE_M + row_here;
        const float of_rows[2] = {scale_a[min(row, m - 1) * scale_a_stride],
                                  scale_a[min(row + 8, m - 1) * scale_a_stride]};
#pragma unroll
        for (int stored = 0; stored < TILE_N; stored += STORED) {
            const long long first = at.column * (long long)TILE_N + stored;
            float results[STORED / 2];
#pragma unroll
            for (int i = 0; i < STORED / 2; i++) {
                const long long column = first + lane % 4 * 2 + i / 4 * 8 + i % 2;
                const float of_column = scale_b[min(column, n - 1) * scale_b_stride];
                results[i] = float(sums[stored / 2 + i]) * (of_rows[i / 2 % 2] * of_column);
            }
            store_sums(results, c, row, first, m, n);
        }
    }
#endif
}
