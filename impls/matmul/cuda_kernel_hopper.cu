// For compute capability 9.0 only: wgmma on tiles that the copy engine (TMA) loads.
#include <type_traits>

#include "activation.cuh"
#include "hopper.cuh"
#include "tiles.cuh"

constexpr int TILE_K = 64;
// Warpgroups of 128 threads: one loads tiles, the others multiply 64 rows of a tile each.
constexpr int MOST_THREADS = 3 * WARPGROUP;
template <int TILE_M> constexpr int MULTIPLYING = TILE_M / 64;

__device__ inline void store_box(const TensorMap& map, unsigned from, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
        ::"l"(&map), "r"(from), "r"(column), "r"(row) : "memory");
}
__device__ inline void store_word(unsigned to, unsigned word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// The tiles of one operand in shared memory: ROWS rows (for b, columns) of the result by TILE_K terms.
//
// If the terms are adjacent in memory, one box of the copy engine is the whole tile, with one line per row. ACROSS: a
// box is 64 rows with one line per term, and the tile consists of several boxes.
template <int ROWS, bool ACROSS> struct Tiles {
    static constexpr int BYTES = ROWS * LINE_BYTES, BOXES = ACROSS ? ROWS / LINE : 1;
    // The distance from one wgmma of 16 terms to the next.
    static constexpr int STEP_BYTES = ACROSS ? 16 * LINE_BYTES : 16 * 2;
    // 64 rows of a, the share of one multiplying warpgroup, take as many bytes in either order.
    static constexpr int SHARE_BYTES = LINE * LINE_BYTES;

    __device__ static void load(unsigned to, const TensorMap& map, unsigned barrier, int row, int term) {
#pragma unroll
        for (int box = 0; box < BOXES; box++) {
            if constexpr (ACROSS) load_box(to + box * TILE_K * LINE_BYTES, map, barrier, row + box * LINE, term);
            else load_box(to, map, barrier, term, row);
        }
    }
    __device__ static unsigned long long descriptor(unsigned address) {
        // Along the terms: from 8 rows to the next 8. Across: from 8 terms to the next 8, and from a box to the next.
        return matrix_descriptor(address, ACROSS ? TILE_K * LINE_BYTES : 16, SWIZZLED);
    }
};

template <int TILE_M, int TILE_N, int STAGES, int STAGED_N, bool A_ALONG_M, bool B_ALONG_N> struct Shared {
    using A = Tiles<TILE_M, A_ALONG_M>;
    using B = Tiles<TILE_N, B_ALONG_N>;
    static constexpr int STAGE_BYTES = A::BYTES + B::BYTES;
    // For each multiplying warpgroup: 64 rows of STAGED_N columns of the result.
    static constexpr int RESULT_BYTES = 64 * STAGED_N * 2;
    static constexpr int BARRIERS = STAGES * STAGE_BYTES + MULTIPLYING<TILE_M> * RESULT_BYTES;
    // With room to align the start to the swizzle's period.
    static constexpr int BYTES = BARRIERS + 2 * STAGES * 8 + SWIZZLED;
};

template <class T> struct Pair;
template <> struct Pair<__half> {
    __device__ static unsigned of(float x, float y) {
        const __half2 pair = __floats2half2_rn(x, y);
        return reinterpret_cast<const unsigned&>(pair);
    }
};
template <> struct Pair<__nv_bfloat16> {
    __device__ static unsigned of(float x, float y) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
        return reinterpret_cast<const unsigned&>(pair);
    }
};

// The place of an element of the result, of 64 rows and several lines of columns, in shared memory: swizzled as the copy
// engine expects, which also spreads a warp's words over all banks.
__device__ inline unsigned place_of(int row, int column) {
    const int chunk = column % LINE / 8 ^ row % 8;
    return column / LINE * 64 * LINE_BYTES + row * LINE_BYTES + chunk * 16 + column % 8 * 2;
}

// A part of the work: a tile of the result, and the steps over the terms of which its sums are taken.
struct Part {
    TileAt at;
    int number, first, last;
    __device__ Part(int item, int tiles_m, int tiles_n, int group, int steps, int parts)
        : at(tile_at(item % (tiles_m * tiles_n), tiles_m, tiles_n, group)),
          number(item / (tiles_m * tiles_n)),
          first(int((long long)number * steps / parts)),
          last(int((number + 1ll) * steps / parts)) {}
};

// STAGED_N: columns of the result that a warpgroup hands to the copy engine at a time. Their shared memory competes
// with that for the STAGES tiles of a and b in flight.
// IN_PARTS: where there are few tiles, several blocks share each: the terms are divided into `parts`, and the sums over
// each part are stored in float32. `sum_of_parts_kernel` adds them.
template <
    class T, int TILE_M, int TILE_N, int STAGES, int STAGED_N, bool A_ALONG_M, bool B_ALONG_N, bool IN_PARTS>
__global__ void __launch_bounds__(MOST_THREADS, 1) matmul_hopper_kernel(
    const __grid_constant__ TensorMap a_map,  // of [m, k], or of [k, m] if A_ALONG_M
    const __grid_constant__ TensorMap b_map,  // of [n, k], or of [k, n] if B_ALONG_N
    const __grid_constant__ TensorMap c_map,  // of [m, n]
    // [m, n], used if there is no map because its rows are not multiples of 16 bytes; [parts, m, n] if IN_PARTS
    std::conditional_t<IN_PARTS, float, T>* __restrict__ c,
    long long m, long long n, long long k, bool by_map, long long group, long long all_parts, long long activation,
    double negative_slope) {
    // One block owns every gridDim.x-th part of a tile [TILE_M, TILE_N] of the result.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Memory = Shared<TILE_M, TILE_N, STAGES, STAGED_N, A_ALONG_M, B_ALONG_N>;
    using A = typename Memory::A;
    using B = typename Memory::B;
    extern __shared__ unsigned char raw[];
    const unsigned base = (shared_address(raw) + SWIZZLED - 1) / SWIZZLED * SWIZZLED;
    const unsigned results = base + STAGES * Memory::STAGE_BYTES;
    const unsigned full = base + Memory::BARRIERS, empty = full + STAGES * 8;
    // The shuffle tells the compiler that the value is the same in all of a warp.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);

    if (threadIdx.x == 0) {
        init_ring<STAGES>(full, empty, MULTIPLYING<TILE_M> * WARPGROUP / 32);
        fence_mbarrier_init();
        prefetch(a_map);
        prefetch(b_map);
        if (by_map) prefetch(c_map);
    }
    __syncthreads();

    const int tiles_m = int((m + TILE_M - 1) / TILE_M), tiles_n = int((n + TILE_N - 1) / TILE_N);
    const int parts = IN_PARTS ? int(all_parts) : 1, steps = int((k + TILE_K - 1) / TILE_K);
    const int items = tiles_m * tiles_n * parts;
    int stage = 0;
    unsigned parity = 0;

    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            for (int item = blockIdx.x; item < items; item += gridDim.x) {
                const Part part(item, tiles_m, tiles_n, int(group), steps, parts);
                for (int step = part.first; step < part.last; step++) {
                    // A stage that was never used counts as empty, because the phase before the first has ended.
                    barrier_wait(empty + stage * 8, parity ^ 1);
                    const unsigned here = base + stage * Memory::STAGE_BYTES, barrier = full + stage * 8;
                    barrier_arrive_expecting(barrier, Memory::STAGE_BYTES);
                    A::load(here, a_map, barrier, part.at.row * TILE_M, step * TILE_K);
                    B::load(here + A::BYTES, b_map, barrier, part.at.column * TILE_N, step * TILE_K);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int share = warpgroup - 1, thread = threadIdx.x % WARPGROUP, lane = thread % 32;
        // Of a warpgroup's 64 rows, a thread has one in each half of its warp's 16 rows, and two of every 8 columns.
        const int row_here = thread / 32 * 16 + lane / 4, pair = lane % 4;
        const unsigned result = results + share * Memory::RESULT_BYTES;
        const float slope = float(negative_slope);
        float sums[TILE_N / 2];
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            const Part part(item, tiles_m, tiles_n, int(group), steps, parts);
            int before = 0;
            for (int step = part.first; step < part.last; step++) {
                barrier_wait(full + stage * 8, parity);
                const unsigned here = base + stage * Memory::STAGE_BYTES;
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < TILE_K / 16; i++) {
                    wgmma<T, B_ALONG_N, A_ALONG_M>(
                        sums, A::descriptor(here + share * A::SHARE_BYTES + i * A::STEP_BYTES),
                        B::descriptor(here + A::BYTES + i * B::STEP_BYTES), step > part.first || i > 0);
                }
                wgmma_commit();
                // The tensor cores stay busy with this step while the stage of the step before is released.
                wgmma_wait<1>();
                if (step > part.first && lane == 0) barrier_arrive(empty + before * 8);
                before = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            wgmma_wait<0>();
            wgmma_written(sums);
            if (lane == 0) barrier_arrive(empty + before * 8);

            const int row = part.at.row * TILE_M + share * 64, column = part.at.column * TILE_N;
            if constexpr (IN_PARTS) {
#pragma unroll
                for (int i = 0; i < TILE_N / 2; i++) {
                    const long long r = row + row_here + i % 4 / 2 * 8, s = column + pair * 2 + i / 4 * 8 + i % 2;
                    if (r < m && s < n) c[(part.number * m + r) * n + s] = sums[i];
                }
            } else {
#pragma unroll
                for (int staged = 0; staged < TILE_N; staged += STAGED_N) {
                    // Wait until the columns handed over before have been read.
                    if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                    sync_threads<WARPGROUP>(warpgroup);
#pragma unroll
                    for (int j = 0; j < STAGED_N / 8; j++) {
                        const int i = (staged / 8 + j) * 4;
                        float here[4];
#pragma unroll
                        for (int e = 0; e < 4; e++) here[e] = activate(sums[i + e], activation, slope);
                        const unsigned to = result + place_of(row_here, j * 8 + pair * 2);
                        store_word(to, Pair<T>::of(here[0], here[1]));
                        store_word(to + 8 * LINE_BYTES, Pair<T>::of(here[2], here[3]));
                    }
                    fence_proxy_async();
                    sync_threads<WARPGROUP>(warpgroup);
                    if (!by_map) {
                        // A warp stores neighbours of a row.
                        const unsigned char* from = raw + (result - shared_address(raw));
                        for (int r = thread / 32; r < 64 && row + r < m; r += WARPGROUP / 32) {
                            T* to = c + (row + r) * n + column + staged;
#pragma unroll
                            for (int s = 0; s < STAGED_N; s += 32)
                                if (column + staged + s + lane < n)
                                    to[s + lane] = *reinterpret_cast<const T*>(from + place_of(r, s + lane));
                        }
                    } else if (thread == 0) {
#pragma unroll
                        for (int line = 0; line < STAGED_N / LINE; line++)
                            store_box(c_map, result + line * 64 * LINE_BYTES, column + staged + line * LINE, row);
                        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                    }
                }
            }
        }
        // Shared memory must stay alive until the copy engine has read it.
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
#endif
}
