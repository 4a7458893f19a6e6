// matmul of float16 by wgmma on tiles that the copy engine (TMA) loads, for compute capability 9.0: correct as NONE,
// else with one mistake. A block is one warpgroup, and owns every gridDim.x-th tile of 64 x 64 of the result.
#include <cuda_fp16.h>

enum Fault {
    NONE, NO_WAIT, ONE_WARP_WAITS, WRONG_PARITY, PARITY_NEVER_TURNS, STAGE_REUSED, NO_BARRIER_BEFORE_REUSE, NO_WGMMA_FENCE,
    REGISTERS_READ_EARLY, NO_PROXY_FENCE, NO_MBARRIER_FENCE, NO_BARRIER_AFTER_INIT, TOO_FEW_BYTES, TOO_MANY_BYTES, RESULT_OVERWRITTEN,
    LEAVES_EARLY, NOT_SWIZZLED, WRONG_STRIDE, NOT_ALIGNED, NO_SYNC_BEFORE_STORE
};

struct __align__(64) TensorMap { unsigned char bytes[128]; };

const int TILE = 64, TILE_BYTES = TILE * TILE * 2, STAGES = 2, STAGE_BYTES = 2 * TILE_BYTES;

__device__ inline void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ inline void load_box(unsigned to, const TensorMap& map, unsigned barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
__device__ inline void store_box(const TensorMap& map, unsigned from, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
        ::"l"(&map), "r"(from), "r"(column), "r"(row) : "memory");
}
__device__ inline void store_word(unsigned to, unsigned word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ inline unsigned long long descriptor(unsigned address, unsigned long long stride_bytes) {
    return (unsigned long long)(address >> 4 & 0x3fff) | 1ull << 16 | stride_bytes >> 4 << 32 | 1ull << 62;
}

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
__device__ inline void multiply(float (&d)[32], unsigned long long a, unsigned long long b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
        "%28,%29,%30,%31}, %32, %33, add, 1, 1, 0, 0;\n}"
        : SIXTEEN(0), SIXTEEN(16) : "l"(a), "l"(b), "r"(add));
}
template <int PENDING> __device__ inline void multiplied() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ inline float activated(float x, long long activation, float slope) {
    if (activation == 1) return x <= 0 ? 0 : x;
    return activation == 2 && x <= 0 ? x * slope : x;
}

template <int FAULT> __global__ void __launch_bounds__(128) tiles_kernel(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap c_map, const __half* c, long long m, long long n, long long k,
    long long activation, double slope) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char raw[];
    const unsigned start = unsigned(__cvta_generic_to_shared(raw));
    const unsigned base = FAULT == NOT_ALIGNED ? (start + 15) / 16 * 16 : (start + 1023) / 1024 * 1024;
    const unsigned result = base + STAGES * STAGE_BYTES, full = result + TILE_BYTES;
    const int thread = threadIdx.x, tiles_n = int((n + TILE - 1) / TILE);
    const int tiles = int((m + TILE - 1) / TILE) * tiles_n, steps = int((k + TILE - 1) / TILE);
    if (thread == 0) {
        for (int stage = 0; stage < STAGES; stage++) barrier_init(full + stage * 8, 1);
        if (FAULT != NO_MBARRIER_FENCE) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (FAULT != NO_BARRIER_AFTER_INIT) __syncthreads();

    float d[32];
    int loads = 0;  // steps of all tiles so far
    auto load = [&](int tile, int step, int number) {
        const unsigned to = base + number % STAGES * STAGE_BYTES, barrier = full + number % STAGES * 8;
        const int bytes = FAULT == TOO_FEW_BYTES ? TILE_BYTES : FAULT == TOO_MANY_BYTES ? 2 * STAGE_BYTES : STAGE_BYTES;
        barrier_expect(barrier, bytes);
        load_box(to, a_map, barrier, step * TILE, tile / tiles_n * TILE);
        load_box(to + TILE_BYTES, b_map, barrier, step * TILE, tile % tiles_n * TILE);
    };
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        if (thread == 0) load(tile, 0, loads);
        for (int step = 0; step < steps; step++, loads++) {
            if (thread == 0 && step + 1 < steps) load(tile, step + 1, loads + 1);
            const unsigned stage = loads % STAGES, parity = FAULT == PARITY_NEVER_TURNS ? 0 : loads / STAGES % 2;
            if (FAULT == ONE_WARP_WAITS ? thread < 32 : FAULT != NO_WAIT) barrier_wait(full + stage * 8, FAULT == WRONG_PARITY ? parity ^ 1 : parity);
            if (FAULT != NO_WGMMA_FENCE) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            const unsigned a = base + stage * STAGE_BYTES, b = a + TILE_BYTES;
#pragma unroll
            for (int i = 0; i < TILE / 16; i++)
                multiply(d, descriptor(a + i * 32, FAULT == WRONG_STRIDE ? 512 : 1024), descriptor(b + i * 32, 1024), step + i > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (FAULT == STAGE_REUSED) multiplied<1>();
            else if (FAULT != REGISTERS_READ_EARLY || step + 1 < steps) multiplied<0>();
            if (FAULT != NO_BARRIER_BEFORE_REUSE) __syncthreads();
        }
        multiplied<FAULT == REGISTERS_READ_EARLY ? 1 : 0>();
        if (thread == 0 && FAULT != RESULT_OVERWRITTEN) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        __syncthreads();
        const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
            for (int half = 0; half < 2; half++) {
                const __half2 pair = __floats2half2_rn(
                    activated(d[j * 4 + half * 2], activation, float(slope)), activated(d[j * 4 + half * 2 + 1], activation, float(slope)));
                const int chunk = FAULT == NOT_SWIZZLED ? j : j ^ row % 8;
                store_word(result + (row + half * 8) * 128 + chunk * 16 + thread % 4 * 4, reinterpret_cast<const unsigned&>(pair));
            }
        if (FAULT != NO_PROXY_FENCE) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        if (FAULT != NO_SYNC_BEFORE_STORE) __syncthreads();
        if (thread == 0) {
            store_box(c_map, result, tile % tiles_n * TILE, tile / tiles_n * TILE);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
    if (thread == 0 && FAULT != LEAVES_EARLY) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}
