// What kernels for compute capability 9.0 are made of, beside mbarriers: the copy engine (TMA), barriers of some threads,
// and wgmma.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "mbarriers.cuh"

// The copy engine's description of a tensor: a CUtensorMap, encoded by the driver.
struct __align__(64) TensorMap { unsigned char bytes[128]; };

constexpr int WARPGROUP = 128;
// A line is 64 elements of 2 bytes. The copy engine's swizzle permutes its 16-byte chunks, with a period of 8 lines.
constexpr int LINE = 64, LINE_BYTES = 128, SWIZZLED = 8 * LINE_BYTES;

// A stage of a ring, and the parity of its phase.
template <int STAGES> struct Turn {
    int stage = 0;
    unsigned parity = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Initializes the barriers of a ring's stages, in one thread. The thread that loads fills a stage; each of `warps` reports
// by itself that it is done with it.
template <int STAGES> __device__ inline void init_ring(unsigned full, unsigned empty, int warps) {
    for (int stage = 0; stage < STAGES; stage++) {
        barrier_init(full + stage * 8, 1);
        barrier_init(empty + stage * 8, warps);
    }
}

// ---- the copy engine

// Loads a box of a matrix.
__device__ inline void load_box(unsigned to, const TensorMap& map, unsigned barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
// Loads a box of a tensor [outer, inner, columns].
__device__ inline void load_box(
    unsigned to, const TensorMap& map, unsigned barrier, int column, int inner, int outer) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
        ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(inner), "r"(outer) : "memory");
}
__device__ inline void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---- barriers of some threads, by numbers from 1 on: number 0 is __syncthreads

template <int COUNT> __device__ inline void sync_threads(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(COUNT) : "memory");
}
template <int COUNT> __device__ inline void arrive_threads(int number) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(COUNT) : "memory");
}

// ---- wgmma

// wgmma's descriptor of a matrix in shared memory: an address, two distances, and the swizzle of 128 bytes. The address
// and the distances are in units of 16 bytes.
__device__ inline unsigned long long matrix_descriptor(
    unsigned address, unsigned leading_bytes, unsigned stride_bytes) {
    const unsigned long long start = address >> 4 & 0x3fff, leading = leading_bytes >> 4, stride = stride_bytes >> 4;
    return start | leading << 16 | stride << 32 | 1ull << 62;
}
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving a use of the registers before the wait for the data that are written to them.
template <int COUNT> __device__ inline void wgmma_written(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int COUNT> __device__ inline void wgmma_written(int (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(d[i])::"memory");
}

template <class T> constexpr bool IS_BFLOAT16 = false;
template <> constexpr bool IS_BFLOAT16<__nv_bfloat16> = true;

// Operands of wgmma: the sums, in registers of a KIND, "f" or "r", and their names.
#define WGMMA_SUMS_4(KIND, i) "+" KIND(d[i]), "+" KIND(d[i + 1]), "+" KIND(d[i + 2]), "+" KIND(d[i + 3])
#define WGMMA_SUMS_16(KIND, i) \
    WGMMA_SUMS_4(KIND, i), WGMMA_SUMS_4(KIND, i + 4), WGMMA_SUMS_4(KIND, i + 8), WGMMA_SUMS_4(KIND, i + 12)
#define WGMMA_SUMS_32(KIND) WGMMA_SUMS_16(KIND, 0), WGMMA_SUMS_16(KIND, 16)
#define WGMMA_SUMS_64(KIND) WGMMA_SUMS_32(KIND), WGMMA_SUMS_16(KIND, 32), WGMMA_SUMS_16(KIND, 48)
#define WGMMA_SUMS_96(KIND) WGMMA_SUMS_64(KIND), WGMMA_SUMS_16(KIND, 64), WGMMA_SUMS_16(KIND, 80)
#define WGMMA_SUMS_128(KIND) WGMMA_SUMS_96(KIND), WGMMA_SUMS_16(KIND, 96), WGMMA_SUMS_16(KIND, 112)
#define WGMMA_NAMES_32                                                                                          \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"                    \
    "%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_NAMES_64                                                                                          \
    WGMMA_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"  \
    "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_NAMES_96                                                                                          \
    WGMMA_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,"  \
    "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_NAMES_128                                                                                         \
    WGMMA_NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,"    \
    "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_SHARED_64(TYPE)                                                                                   \
    asm volatile(                                                                                               \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                                        \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_32                         \
        "}, %32, %33, add, 1, 1, %35, %36;\n}"                                                                  \
        : WGMMA_SUMS_32("f")                                                                                    \
        : "l"(a), "l"(b), "r"(add), "n"(A_ACROSS), "n"(ACROSS))
#define WGMMA_REGISTERS_64(TYPE)                                                                                \
    asm volatile(                                                                                               \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                                        \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_32                         \
        "}, {%32,%33,%34,%35}, %36, add, 1, 1, %38;\n}"                                                         \
        : WGMMA_SUMS_32("f")                                                                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(ACROSS))
#define WGMMA_SHARED_128(TYPE)                                                                                  \
    asm volatile(                                                                                               \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                                        \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_64                        \
        "}, %64, %65, add, 1, 1, %67, %68;\n}"                                                                  \
        : WGMMA_SUMS_64("f")                                                                                    \
        : "l"(a), "l"(b), "r"(add), "n"(A_ACROSS), "n"(ACROSS))
#define WGMMA_REGISTERS_128(TYPE)                                                                               \
    asm volatile(                                                                                               \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"                                                        \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_64                        \
        "}, {%64,%65,%66,%67}, %68, add, 1, 1, %70;\n}"                                                         \
        : WGMMA_SUMS_64("f")                                                                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(ACROSS))
#define WGMMA_SHARED_192(TYPE)                                                                                  \
    asm volatile(                                                                                               \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"                                                        \
        "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_96                        \
        "}, %96, %97, add, 1, 1, %99, %100;\n}"                                                                 \
        : WGMMA_SUMS_96("f")                                                                                    \
        : "l"(a), "l"(b), "r"(add), "n"(A_ACROSS), "n"(ACROSS))
#define WGMMA_SHARED_256(TYPE)                                                                                  \
    asm volatile(                                                                                               \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                                                       \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_128                       \
        "}, %128, %129, add, 1, 1, %131, %132;\n}"                                                              \
        : WGMMA_SUMS_128("f")                                                                                   \
        : "l"(a), "l"(b), "r"(add), "n"(A_ACROSS), "n"(ACROSS))
#define WGMMA_REGISTERS_256(TYPE)                                                                               \
    asm volatile(                                                                                               \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %133, 0;\n"                                                       \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_128                       \
        "}, {%128,%129,%130,%131}, %132, add, 1, 1, %134;\n}"                                                   \
        : WGMMA_SUMS_128("f")                                                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(ACROSS))

// d = a b, or d + a b: [64, 16] times [16, 2 * registers]. a is in shared memory, with adjacent terms, or A_ACROSS with
// adjacent rows; or in registers, as mma.sync has them. b is in shared memory, with adjacent terms, or ACROSS with
// adjacent columns.
template <class T, int ACROSS, int A_ACROSS = 0>
__device__ inline void wgmma(float (&d)[32], unsigned long long a, unsigned long long b, int add) {
    if constexpr (IS_BFLOAT16<T>) WGMMA_SHARED_64("bf16");
    else WGMMA_SHARED_64("f16");
}
template <class T, int ACROSS>
__device__ inline void wgmma(float (&d)[32], const unsigned (&a)[4], unsigned long long b, int add) {
    if constexpr (IS_BFLOAT16<T>) WGMMA_REGISTERS_64("bf16");
    else WGMMA_REGISTERS_64("f16");
}
template <class T, int ACROSS, int A_ACROSS = 0>
__device__ inline void wgmma(float (&d)[64], unsigned long long a, unsigned long long b, int add) {
    if constexpr (IS_BFLOAT16<T>) WGMMA_SHARED_128("bf16");
    else WGMMA_SHARED_128("f16");
}
template <class T, int ACROSS>
__device__ inline void wgmma(float (&d)[64], const unsigned (&a)[4], unsigned long long b, int add) {
    if constexpr (IS_BFLOAT16<T>) WGMMA_REGISTERS_128("bf16");
    else WGMMA_REGISTERS_128("f16");
}
template <class T, int ACROSS, int A_ACROSS = 0>
__device__ inline void wgmma(float (&d)[96], unsigned long long a, unsigned long long b, int add) {
    if constexpr (IS_BFLOAT16<T>) WGMMA_SHARED_192("bf16");
    else WGMMA_SHARED_192("f16");
}
template <class T, int ACROSS, int A_ACROSS = 0>
__device__ inline void wgmma(float (&d)[128], unsigned long long a, unsigned long long b, int add) {
    if constexpr (IS_BFLOAT16<T>) WGMMA_SHARED_256("bf16");
    else WGMMA_SHARED_256("f16");
}
template <class T, int ACROSS>
__device__ inline void wgmma(float (&d)[128], const unsigned (&a)[4], unsigned long long b, int add) {
    if constexpr (IS_BFLOAT16<T>) WGMMA_REGISTERS_256("bf16");
    else WGMMA_REGISTERS_256("f16");
}

// d = a b, or d + a b, of int8 numbers in shared memory with adjacent terms, and sums of int32, which wrap around:
// [64, 32] times [32, 2 * registers].
__device__ inline void wgmma_int8(int (&d)[64], unsigned long long a, unsigned long long b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" WGMMA_NAMES_64 "}, %64, %65, add;\n}"
        : WGMMA_SUMS_64("r")
        : "l"(a), "l"(b), "r"(add));
}
__device__ inline void wgmma_int8(int (&d)[128], unsigned long long a, unsigned long long b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {" WGMMA_NAMES_128 "}, %128, %129, add;\n}"
        : WGMMA_SUMS_128("r")
        : "l"(a), "l"(b), "r"(add));
}
