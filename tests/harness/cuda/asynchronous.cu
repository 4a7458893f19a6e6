// Right kernels with inline PTX: mbarriers, copies by the copy engine, named barriers. `rows` x 32 halves are summed.
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
