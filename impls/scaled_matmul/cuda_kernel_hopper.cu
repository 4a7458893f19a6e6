// For compute capability 9.0 only: wgmma on float16 copies of both matrices, whose tiles the copy engine (TMA) loads.
#include "hopper.cuh"
#include "tiles.cuh"

// Terms that share a scale of a, and of b; columns of the result that share a scale of b; rows of a tile.
constexpr int BLOCK = 128;
// Warpgroups of 128 threads: one loads tiles, two multiply 64 rows of a tile each.
constexpr int MULTIPLYING = 2, THREADS = WARPGROUP * (1 + MULTIPLYING);
// A box is a line of each of 128 rows. Two of them, 128 terms of 128 rows, are a stage.
constexpr int BOX_BYTES = BLOCK * LINE_BYTES, STAGE_BYTES = BLOCK / LINE * BOX_BYTES;

// A stage of a ring, and the parity of its phase.
template <int STAGES> struct Turn {
    int stage = 0;
    unsigned parity = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Begins sums = a b^T: 64 rows of a stage times one.
template <bool TWICE = false> __device__ inline void multiply(float (&sums)[BLOCK / 2], unsigned a, unsigned b) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK / 16; i++) {
        const unsigned at = i / 4 * BOX_BYTES + i % 4 * 32;
        wgmma<__half, 0>(sums, matrix_descriptor(a + at, 16, SWIZZLED), matrix_descriptor(b + at, 16, SWIZZLED), i > 0);
        if (TWICE && i == 3) wgmma_commit();
    }
    wgmma_commit();
}

template <class T>
__device__ inline void store_pair(T* to, float x, float y) { to[0] = T(x), to[1] = T(y); }
template <> __device__ inline void store_pair(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = {x, y}; }
template <> __device__ inline void store_pair(__half* to, float x, float y) {
    *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x, y);
}
template <> __device__ inline void store_pair(__nv_bfloat16* to, float x, float y) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}

template <class T, int ACROSS, int STAGES, int MODE>
__global__ void __launch_bounds__(THREADS, 1) scaled_matmul_hopper_kernel(
    const __grid_constant__ TensorMap a_map,  // of [lines, m, 64], with an even number of lines
    const __grid_constant__ TensorMap b_map,  // of [lines, n, 64]
    const float* __restrict__ scale_a,        // [m, lines / 2], strided
    const float* __restrict__ scale_b,        // [ceil(n / BLOCK), lines / 2], strided
    T* __restrict__ c,                        // [m, n]
    long long m, long long n, long long lines, long long scale_a_row_stride, long long scale_a_column_stride,
    long long scale_b_row_stride, long long scale_b_column_stride, long long group) {
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
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 0) return;
        for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
            const TileAt at = tile_at(tile, tiles_m, tiles_n, int(group));
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

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int share = warpgroup - 1, thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    // Of a warpgroup's 64 rows, a thread has one in each half of its warp's 16 rows, and two of every 8 columns.
    const int row_here = share * 64 + thread / 32 * 16 + lane / 4, pair = lane % 4;
    if ((MODE == 1 || MODE == 3) && share == 1) arrive_threads<2 * WARPGROUP>(1);
    for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
        const TileAt at = tile_at(tile, tiles_m, tiles_n, int(group));
        const long long row = at.row * (long long)BLOCK + row_here;
        const float* of_rows = scale_a + row * scale_a_row_stride;
        const float* of_columns = scale_b + (long long)at.column * ACROSS * scale_b_row_stride;
        const int there = blocks_n - at.column * ACROSS;
        float total[ACROSS][BLOCK / 2];
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
#pragma unroll
            for (int i = 0; i < BLOCK / 2; i++) total[j][i] = 0;
        const auto scales = [&](float (&of)[2], int block, int j) {
            const float column = j < there ? of_columns[j * scale_b_row_stride + block * scale_b_column_stride] : 0.0f;
#pragma unroll
            for (int r = 0; r < 2; r++)
                of[r] = row + r * 8 < m
                    ? of_rows[r * 8 * scale_a_row_stride + block * scale_a_column_stride] * column : 0.0f;
        };
        const auto promote = [&](const float (&sums)[BLOCK / 2], const float (&of)[2], int j) {
#pragma unroll
            for (int i = 0; i < BLOCK / 2; i++) total[j][i] += sums[i] * of[i / 2 % 2];
        };
        if constexpr (MODE == 2) {  // two blocks of terms in flight
            static_assert(ACROSS == 1);
            float sums[2][BLOCK / 2], of[2];
            unsigned stages[2][2];
            const auto begin = [&](int i) {
#pragma unroll
                for (int side = 0; side < 2; side++, turn.next()) {
                    barrier_wait(full + turn.stage * 8, turn.parity);
                    stages[i][side] = turn.stage;
                }
                multiply(sums[i], base + stages[i][0] * STAGE_BYTES + share * 64 * LINE_BYTES,
                         base + stages[i][1] * STAGE_BYTES);
            };
            const auto end = [&](int i, int block) {
                wgmma_written(sums[i]);
                if (lane == 0) barrier_arrive(empty + stages[i][0] * 8), barrier_arrive(empty + stages[i][1] * 8);
                promote(sums[i], of, 0);
                if (block + 1 < blocks) scales(of, block + 1, 0);
            };
            int block = 0;
            scales(of, 0, 0);
            begin(0);
            for (; block + 2 < blocks; block += 2) {
                begin(1);
                wgmma_wait<1>();
                end(0, block);
                begin(0);
                wgmma_wait<1>();
                end(1, block + 1);
            }
            if (block + 1 < blocks) {
                begin(1);
                wgmma_wait<1>();
                end(0, block);
                wgmma_wait<0>();
                end(1, block + 1);
            } else {
                wgmma_wait<0>();
                end(0, block);
            }
        } else {
            float sums[BLOCK / 2], of[2];
            for (int block = 0; block < blocks; block++) {
                const unsigned left = turn.stage;
                barrier_wait(full + left * 8, turn.parity);
                turn.next();
#pragma unroll
                for (int j = 0; j < ACROSS; j++, turn.next()) {
                    scales(of, block, j);
                    barrier_wait(full + turn.stage * 8, turn.parity);
                    if constexpr (MODE == 1 || MODE == 3) sync_threads<2 * WARPGROUP>(1 + share);
                    multiply<MODE == 3>(sums, base + left * STAGE_BYTES + share * 64 * LINE_BYTES, base + turn.stage * STAGE_BYTES);
                    if constexpr (MODE == 1) arrive_threads<2 * WARPGROUP>(2 - share);
                    if constexpr (MODE == 3) {
                        wgmma_wait<1>();
                        arrive_threads<2 * WARPGROUP>(2 - share);
                    }
                    wgmma_wait<0>();
                    wgmma_written(sums);
                    if (lane == 0) {
                        barrier_arrive(empty + turn.stage * 8);
                        if (j == ACROSS - 1) barrier_arrive(empty + left * 8);
                    }
                    promote(sums, of, j);
                }
            }
        }
        const bool pairs = n % 2 == 0;
#pragma unroll
        for (int j = 0; j < ACROSS; j++) {
#pragma unroll
            for (int i = 0; i < BLOCK / 2; i += 2) {
                const long long r = row + i / 2 % 2 * 8;
                const long long column = (at.column * ACROSS + j) * (long long)BLOCK + i / 4 * 8 + pair * 2;
                if (r >= m || column >= n) continue;
                T* to = c + r * n + column;
                if (pairs) store_pair(to, total[j][i], total[j][i + 1]);
                else {
                    to[0] = T(total[j][i]);
                    if (column + 1 < n) to[1] = T(total[j][i + 1]);
                }
            }
        }
    }
    if ((MODE == 1 || MODE == 3) && share == 0) sync_threads<2 * WARPGROUP>(1);
#endif
}
