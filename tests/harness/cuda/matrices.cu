// Products of a warp by ldmatrix and mma.sync: right ones, and ones with a mistake that is reported.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum Mistake { NONE, MISALIGNED_ROW, ROW_PAST_THE_END, ONE_LANE_AWAY, READ_BEFORE_THE_BARRIER };

__device__ unsigned address(const void* pointer) { return unsigned(__cvta_generic_to_shared(pointer)); }

__device__ void add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ void add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __nv_bfloat16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d [16, 8] = a [16, 16] b + 1, where b is [16, 8], or [8, 16] if transposed.
template <class T, bool TRANSPOSED>
__global__ void product(const T* a, const T* b, float* d, int mistake) {
    __shared__ __align__(16) T rows[16][24], others[16][24];
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) rows[i / 16][i % 16] = a[i];
    for (int i = lane; i < 128; i += 32) others[TRANSPOSED ? i / 16 : i / 8][TRANSPOSED ? i % 16 : i % 8] = b[i];
    if (mistake != READ_BEFORE_THE_BARRIER) __syncthreads();
    unsigned x[4], y[2];
    float sums[4] = {1, 1, 1, 1};
    const T* row = &rows[lane % 16][0] + lane / 16 * 8;
    if (mistake == MISALIGNED_ROW) row += 1;
    if (mistake == ROW_PAST_THE_END) row += 16 * 24 * 2;
    if (mistake == ONE_LANE_AWAY && lane == 5) return;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address(row)));
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(y[0]), "=r"(y[1]) : "r"(address(&others[lane % 8][lane / 8 % 2 * 8])));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(y[0]), "=r"(y[1]) : "r"(address(&others[lane % 16][0])));
    }
    add(sums, x, y, T());
    for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}
