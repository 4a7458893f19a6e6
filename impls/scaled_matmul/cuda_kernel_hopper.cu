// For compute capability 9.0 only: wgmma on float16 numbers, whose tiles the copy engine (TMA) loads. The left matrix
// is converted in registers, and the right one before.
#include "hopper.cuh"
#include "scaled_matmul/quantised.cuh"
#include "scaled_matmul/results.cuh"
#include "tiles.cuh"

// Terms that share a scale of a, and of b; columns of the result that share a scale of b; rows of a tile.
constexpr int BLOCK = 128;
// Warpgroups of 128 threads: one loads tiles, two multiply 64 rows of a tile each.
constexpr int MULTIPLYING = 2, THREADS = WARPGROUP * (1 + MULTIPLYING);
// Rows of tiles that are walked column by column, so that inputs stay in the cache.
constexpr int GROUP = 8;
// A box, one stage, is a line of each of 128 rows: 128 terms of the left matrix, or 64 of the right one. A thread
// sums COLUMNS columns of a block of terms at a time, in two sets of registers by turns.
constexpr int BOX_BYTES = BLOCK * LINE_BYTES, COLUMNS = 64;

// Loads half of the terms of 64 rows of a box, and converts them from TYPE. Of 16 terms a thread has those of four adjacent
// places, as to_float16_kernel orders them.
template <int TYPE> __device__ inline void load_terms(unsigned (&terms)[LINE / 16][4], unsigned rows, int half) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < LINE / 16; i += 2) {
        unsigned bits[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                     : "r"(rows + row * LINE_BYTES + ((half * 4 + i + lane / 16) ^ row % 8) * 16) : "memory");
#pragma unroll
        for (int e = 0; e < 8; e++) terms[i + e / 4][e % 4] = decoded<TYPE>(bits[e / 4 * 2 + e % 2] >> e % 4 / 2 * 16);
    }
}

// Begins sums = a b^T, or sums + a b^T: 64 terms of 64 rows and 64 columns.
__device__ inline void multiply(float (&sums)[COLUMNS / 2], const unsigned (&a)[LINE / 16][4], unsigned b, bool add) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < LINE / 16; i++)
        wgmma<__half, 0>(sums, a[i], matrix_descriptor(b + i * 32, 16, SWIZZLED), add || i > 0);
    wgmma_commit();
}

// Adds the sums of a block of terms, which have been waited for: with its scales, or as they are if ROWWISE.
template <bool ROWWISE>
__device__ inline void add_scaled(float (&total)[COLUMNS / 2], float (&sums)[COLUMNS / 2], const float (&of_rows)[2],
                                  float of_columns) {
    wgmma_written(sums);
    const float scales[2] = {of_rows[0] * of_columns, of_rows[1] * of_columns};
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) {
        if constexpr (ROWWISE) total[i] += sums[i];
        else total[i] += sums[i] * scales[i / 2 % 2];
    }
}

template <class T, int ACROSS, int STAGES, int TYPE, bool ROWWISE>
__global__ void __launch_bounds__(THREADS, 1) scaled_matmul_hopper_kernel(
    const __grid_constant__ TensorMap a_map,  // of TYPE [m, terms], in elements of 2 bytes
    const __grid_constant__ TensorMap b_map,  // of float16 [n, terms], with zeros up to a multiple of BLOCK
    const float* __restrict__ scale_a,        // [m, terms / BLOCK], strided; [m] if ROWWISE
    const float* __restrict__ scale_b,        // [ceil(n / BLOCK), terms / BLOCK], strided; [n] if ROWWISE
    T* __restrict__ c,                        // [m, n]
    long long m, long long n, long long terms, long long scale_a_row_stride, long long scale_a_column_stride,
    long long scale_b_row_stride, long long scale_b_column_stride) {
    // One block owns every gridDim.x-th tile of 128 rows and ACROSS blocks of columns.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char raw[];
    const unsigned base = (shared_address(raw) + SWIZZLED - 1) / SWIZZLED * SWIZZLED;
    const unsigned full = base + STAGES * BOX_BYTES, empty = full + STAGES * 8;
    // The shuffle tells the compiler that the value is the same in all of a warp.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0) {
        init_ring<STAGES>(full, empty, MULTIPLYING * WARPGROUP / 32);
        fence_mbarrier_init();
        prefetch(a_map);
        prefetch(b_map);
    }
    __syncthreads();

    const int tiles_m = int((m + BLOCK - 1) / BLOCK), blocks_n = int((n + BLOCK - 1) / BLOCK);
    const int tiles_n = (blocks_n + ACROSS - 1) / ACROSS, blocks = int(terms / BLOCK);
    Turn<STAGES> turn, done;

    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x != 0) return;
        for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
            const TileAt at = tile_at(tile, tiles_m, tiles_n, GROUP);
            for (int block = 0; block < blocks; block++) {
                for (int box = 0; box <= 2 * ACROSS; box++, turn.next()) {
                    const unsigned here = base + turn.stage * BOX_BYTES, barrier = full + turn.stage * 8;
                    // A stage that was never used counts as empty, because the phase before the first has ended.
                    barrier_wait(empty + turn.stage * 8, turn.parity ^ 1);
                    barrier_arrive_expecting(barrier, BOX_BYTES);
                    const int line = block * 2 + (box - 1) % 2, columns = at.column * ACROSS + (box - 1) / 2;
                    if (box) load_box(here, b_map, barrier, line * LINE, columns * BLOCK);
                    else load_box(here, a_map, barrier, block * LINE, at.row * BLOCK);
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
        const float* of_row = scale_a + min(row, m - 1) * scale_a_row_stride;
        const int next_row = int(min(max(m - 1 - row, 0ll), 8ll));
        const float* of_column = scale_b + (long long)at.column * ACROSS * scale_b_row_stride;
        const long long next_column = min(blocks_n - 1 - at.column * ACROSS, 1) * scale_b_row_stride;
        float total[2 * ACROSS][COLUMNS / 2] = {};
        float sums[2][COLUMNS / 2] = {}, of_rows[2] = {}, of_columns[ACROSS] = {};
        unsigned numbers[2][LINE / 16][4];
        const auto take = [&] {
            const unsigned box = base + turn.stage * BOX_BYTES;
            barrier_wait(full + turn.stage * 8, turn.parity);
            turn.next();
            return box;
        };
        const auto release = [&](int boxes) {
#pragma unroll
            for (int i = 0; i < boxes; i++, done.next())
                if (lane == 0) barrier_arrive(empty + done.stage * 8);
        };
        // Terms are converted, and sums added, while the tensor cores multiply what was begun before.
        for (int block = 0; block < blocks; block++) {
            const unsigned left = take() + share * 64 * LINE_BYTES;
            // Until then wgmma reads the registers of the first half of the last block's terms.
            wgmma_wait<1>();
            load_terms<TYPE>(numbers[0], left, 0);
            unsigned first = take();
            wgmma_wait<0>();
            multiply(sums[0], numbers[0], first, false);
            load_terms<TYPE>(numbers[1], left, 1);
            unsigned second = take();
            multiply(sums[0], numbers[1], second, true);
            __syncwarp();
            if (block) release(2);
            release(1);
            add_scaled<ROWWISE>(total[2 * ACROSS - 1], sums[1], of_rows, of_columns[ACROSS - 1]);
            if constexpr (!ROWWISE) {
#pragma unroll
                for (int r = 0; r < 2; r++) of_rows[r] = of_row[r * next_row * scale_a_row_stride];
#pragma unroll
                for (int i = 0; i < ACROSS; i++) of_columns[i] = of_column[i * next_column];
                of_row += scale_a_column_stride, of_column += scale_b_column_stride;
            }
#pragma unroll
            for (int j = 1; j < 2 * ACROSS; j++) {
                if (j % 2 == 0) first = take(), second = take();
                multiply(sums[j % 2], numbers[0], first + j % 2 * COLUMNS * LINE_BYTES, false);
                wgmma_wait<1>();
                add_scaled<ROWWISE>(total[j - 1], sums[(j - 1) % 2], of_rows, of_columns[(j - 1) / 2]);
                multiply(sums[j % 2], numbers[1], second + j % 2 * COLUMNS * LINE_BYTES, true);
                if (j % 2 == 0) release(2);
            }
        }
        wgmma_wait<0>();
        release(2);
        add_scaled<ROWWISE>(total[2 * ACROSS - 1], sums[1], of_rows, of_columns[ACROSS - 1]);
#pragma unroll
        for (int j = 0; j < 2 * ACROSS; j++) {
            const long long first = at.column * (long long)ACROSS * BLOCK + j * COLUMNS;
            float results[COLUMNS / 2];
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) {
                results[i] = total[j][i];
                if constexpr (ROWWISE) {
                    const long long here = first + lane % 4 * 2 + i / 4 * 8 + i % 2;
                    results[i] *= of_row[i / 2 % 2 * next_row * scale_a_row_stride] *
                                  scale_b[min(here, n - 1) * scale_b_row_stride];
                }
            }
            store_sums(results, c, row, first, m, n);
        }
    }
#endif
}
