// Right kernels with inline PTX: mbarriers, copies by the copy engine, named barriers. `rows` x 32 halves are summed.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct __align__(64) TensorMap { unsigned char bytes[128]; };
const int ROWS = 8, BYTES = ROWS * 32 * 2;

__device__ inline unsigned address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }
__device__ inline void init(void* barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
}
__device__ inline void expect(void* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}
__device__ inline void arrive(void* barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(address(barrier)) : "memory");
}
__device__ inline bool over(void* barrier, unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n"
        "  .reg .pred p;  // a comment; with a semicolon\n"
        "  mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "  selp.b32 %0, 1, 0, p;\n"
        "}" : "=r"(done) : "r"(address(barrier)), "r"(parity) : "memory");
    return done;
}
__device__ inline void wait(void* barrier, unsigned parity) {
    while (!over(barrier, parity)) {}
}
__device__ inline void load(void* to, const TensorMap& map, void* barrier, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        ::"r"(address(to)), "l"(&map), "r"(address(barrier)), "r"(0), "r"(row) : "memory");
}

// A warp loads two stages in turn; three warps read them, each thread by itself, and each reports that it has.
__global__ void pipeline(const __grid_constant__ TensorMap map, const __half* x, float* sums, int rows) {
    __shared__ __align__(128) __half tile[2][ROWS][32];
    __shared__ unsigned long long full[2], empty[2];
    const int lane = threadIdx.x % 32, steps = rows / ROWS;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < 2; stage++) init(&full[stage], 1), init(&empty[stage], 96);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < steps; i++) {
            wait(&empty[i % 2], (i / 2 + 1) % 2);
            expect(&full[i % 2], BYTES);
            load(tile[i % 2], map, &full[i % 2], i * ROWS);
        }
    } else if (threadIdx.x >= 32) {
        float sum = 0;
        for (int i = 0; i < steps; i++) {
            wait(&full[i % 2], i / 2 % 2);
            for (int r = 0; r < ROWS; r++) sum += __half2float(tile[i % 2][r][lane]);
            arrive(&empty[i % 2]);
        }
        if (threadIdx.x < 64) sums[lane] = sum;
    }
}

// Two pairs of warps meet at barriers of their own, and use shared memory again after them.
__global__ void pairs_of_warps(const __grid_constant__ TensorMap map, const __half* x, float* sums, int rows) {
    __shared__ float values[128];
    const int pair = threadIdx.x / 64, other = pair * 64 + (threadIdx.x + 32) % 64;
    float sum = 0;
    for (int r = pair; r < rows; r += 2) {
        values[threadIdx.x] = threadIdx.x / 32 % 2 ? 0.0f : __half2float(x[r * 32 + threadIdx.x % 32]);
        asm volatile("bar.sync %0, %1;" ::"r"(pair + 1), "n"(64) : "memory");
        sum += values[threadIdx.x] + values[other];
        asm volatile("bar.sync %0, %1;" ::"r"(pair + 1), "n"(64) : "memory");
    }
    values[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < 32) sums[threadIdx.x] = values[threadIdx.x] + values[threadIdx.x + 64];
}

// One lane waits, for all of its warp.
__global__ void one_lane_waits(const __grid_constant__ TensorMap map, const __half* x, float* sums, int rows) {
    __shared__ __align__(128) __half tile[ROWS][32];
    __shared__ unsigned long long full;
    float sum = 0;
    if (threadIdx.x == 0) {
        init(&full, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int i = 0; i < rows / ROWS; i++) {
        if (threadIdx.x == 0) {
            expect(&full, BYTES);
            load(tile, map, &full, i * ROWS);
            wait(&full, i % 2);
        }
        __syncwarp();
        for (int r = 0; r < ROWS; r++) sum += __half2float(tile[r][threadIdx.x]);
        __syncwarp();
    }
    sums[threadIdx.x] = sum;
}

// A box of a tensor of planes is loaded, and stored from another start on.
__global__ void box_of_planes(
    const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, const void* x, int bytes, int column, int row, int plane,
    int to_column, int to_row, int to_plane) {
    extern __shared__ __align__(16) unsigned char raw[];
    __shared__ unsigned long long full;
    const unsigned tile = (address(raw) + 1023) / 1024 * 1024;
    init(&full, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    expect(&full, bytes);
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
        ::"r"(tile), "l"(&from), "r"(address(&full)), "r"(column), "r"(row), "r"(plane) : "memory");
    wait(&full, 0);
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
        ::"l"(&to), "r"(tile), "r"(to_column), "r"(to_row), "r"(to_plane) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---- wgmma with a in registers

#define FOUR(KIND, i) "+" KIND(d[i]), "+" KIND(d[i + 1]), "+" KIND(d[i + 2]), "+" KIND(d[i + 3])
#define SIXTEEN(KIND, i) FOUR(KIND, i), FOUR(KIND, i + 4), FOUR(KIND, i + 8), FOUR(KIND, i + 12)
#define NAMES                                                                                                      \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"       \
    "%28,%29,%30,%31}"
#define MULTIPLY(TYPE)                                                                                             \
    asm volatile(                                                                                                  \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                                          \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " NAMES                                       \
        ", {%32,%33,%34,%35}, %36, add, 1, 1, 1;\n}"                                                              \
        : SIXTEEN("f", 0), SIXTEEN("f", 16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
__device__ inline void multiply(float (&d)[32], const unsigned (&a)[4], unsigned long long b, int add, __half) {
    MULTIPLY("f16");
}
__device__ inline void multiply(float (&d)[32], const unsigned (&a)[4], unsigned long long b, int add, __nv_bfloat16) {
    MULTIPLY("bf16");
}

enum Fault { NONE, NO_FENCE, NO_FENCE_AGAIN, NO_WAIT, NO_WAIT_FOR_GROUP, DIVERGENT };

// A warpgroup multiplies a [64, 16], twice, by b [16, 64], whose columns are adjacent.
template <class T, Fault FAULT>
__global__ void registers_times_shared(
    const __grid_constant__ TensorMap map, const unsigned* a, float* sums) {
    extern __shared__ __align__(16) unsigned char raw[];
    __shared__ unsigned long long full;
    const unsigned tile = (address(raw) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
        init(&full, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        expect(&full, 16 * 64 * 2);
        load((void*)__cvta_shared_to_generic(tile), map, &full, 0);
    }
    wait(&full, 0);
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    // Words of two neighbours: of rows 8 apart, and then of terms 8 apart.
    unsigned words[4];
    for (int i = 0; i < 4; i++) words[i] = a[(row + i % 2 * 8) * 8 + pair + i / 2 * 4];
    const unsigned long long b = (tile >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
    float d[32];
    for (int i = 0; i < 32; i++) d[i] = 0;
    if (FAULT != NO_FENCE) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply(d, words, b, 0, T());
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (FAULT == NO_FENCE_AGAIN) {
        // The registers of d are still taken, and those of a are new.
        multiply(d, words, b, 1, T());
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
    multiply(d, words, b, 1, T());
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 32; i++) sums[(row + i % 4 / 2 * 8) * 64 + i / 4 * 8 + pair * 2 + i % 2] = d[i];
}

// ---- wgmma of int8

__device__ inline void multiply(int (&d)[32], unsigned long long a, unsigned long long b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 " NAMES ", %32, %33, add;\n}"
        : SIXTEEN("r", 0), SIXTEEN("r", 16) : "l"(a), "l"(b), "r"(add));
}

// A warpgroup multiplies a [64, 128] by b [64, 128], and may add the product to the sums.
template <Fault FAULT>
__global__ void shared_times_shared(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, int* sums, int add) {
    extern __shared__ __align__(16) unsigned char raw[];
    __shared__ unsigned long long full;
    const unsigned tile = (address(raw) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
        init(&full, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        expect(&full, 2 * 64 * 128);
        load((void*)__cvta_shared_to_generic(tile), a_map, &full, 0);
        load((void*)__cvta_shared_to_generic(tile + 64 * 128), b_map, &full, 0);
    }
    if (FAULT != NO_WAIT) wait(&full, 0);
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    const unsigned long long a = (tile >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62, b = a + 64 * 128 / 16;
    int* to[32];
    for (int i = 0; i < 32; i++) to[i] = sums + (row + i % 4 / 2 * 8) * 64 + i / 4 * 8 + pair * 2 + i % 2;
    int d[32];
    for (int i = 0; i < 32; i++) d[i] = *to[i];
    if (FAULT != NO_FENCE) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int i = 0; i < 4; i++) multiply(d, a + i * 2, b + i * 2 + (FAULT == DIVERGENT && row > 8), add || i > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (FAULT != NO_WAIT_FOR_GROUP) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 32; i++) *to[i] = d[i];
}

__global__ void powers_of_two(const float* x, float* y) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x[threadIdx.x]));
    y[threadIdx.x] = power;
}
