// Rows that the copy engine brings to shared memory, some ahead of the one that is computed. A block, or the blocks of a
// cluster together, own one row at a time. Rows lie in whole vectors of 16 bytes.
#pragma once
#include "clusters.cuh"
#include "vectors.cuh"
#if __CUDA_ARCH__ >= 900
#include "mbarriers.cuh"

// Loads adjacent bytes, a multiple of 16 from a multiple of 16 on.
__device__ inline void load_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
#endif

constexpr int MAX_STAGES = 16;

// The part of a row of `vectors` vectors that a block of a cluster owns: neighbours, from `first` on.
struct Slice {
    int most, first, count;  // no block owns more than `most`

    __device__ Slice(long long vectors, int block, int blocks)
        : most(int((vectors + blocks - 1) / blocks)),
          first(block * most),
          count(max(min(most, int(vectors) - first), 0)) {}
};

// A ring of stages. Each has the block's slice of one row of TENSORS tensors. Thread 0 fills them; all threads wait for
// the present stage, read it and pass on to the next.
template <int TENSORS> struct Stages {
    uint4* memory;
    unsigned long long* filled;  // mbarriers
    const Slice slice;
    const int stages;
    int present = 0, parity = 0;

    __device__ Stages(int stages, const Slice& slice) : slice(slice), stages(stages) {
        extern __shared__ __align__(16) unsigned char raw[];
        __shared__ unsigned long long barriers[MAX_STAGES];
        memory = reinterpret_cast<uint4*>(raw);
        filled = barriers;
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0) {
            for (int i = 0; i < stages; i++) barrier_init(shared_address(filled + i), 1);
            fence_mbarrier_init();
        }
        __syncthreads();
#endif
    }

    __device__ uint4* of(int stage, int tensor) const { return memory + (stage * TENSORS + tensor) * slice.most; }

    // Begins to fill a stage with a row of each tensor. Only thread 0 may call it.
    template <class... T> __device__ void fill(int stage, const T*... rows) const {
        static_assert(sizeof...(rows) == TENSORS, "a row of each tensor");
        int tensor = 0;
#if __CUDA_ARCH__ >= 900
        barrier_arrive_expecting(shared_address(filled + stage), slice.count * 16 * TENSORS);
#endif
        (copy(stage, tensor++, reinterpret_cast<const uint4*>(rows) + slice.first), ...);
    }

    // Waits until the present stage is filled.
    __device__ void wait() const {
#if __CUDA_ARCH__ >= 900
        barrier_wait(shared_address(filled + present), parity);
#else
        __syncthreads();
#endif
    }

    // Waits until all threads have read the present stage. Then it may be filled again.
    __device__ void release() const {
#if __CUDA_ARCH__ >= 900
        fence_proxy_async();
#endif
        __syncthreads();
    }

    __device__ void pass_on() {
        if (++present < stages) return;
        present = 0;
        parity ^= 1;
    }

    __device__ void copy(int stage, int tensor, const uint4* from) const {
        uint4* to = of(stage, tensor);
#if __CUDA_ARCH__ >= 900
        load_bulk(shared_address(to), from, slice.count * 16, shared_address(filled + stage));
#else
        for (int i = 0; i < slice.count; i++) to[i] = from[i];
#endif
    }
};

// The vector of a stage, of type T.
template <class T> __device__ Vector<T, 16 / sizeof(T)> vector_at(const uint4* from) {
    return Vector<T, 16 / sizeof(T)>::load(reinterpret_cast<const T*>(from));
}

// Loads the vectors of a block's columns that a thread computes: every blockDim.x-th.
template <class T, int VECTORS>
__device__ inline void load_columns(Vector<T, 16 / sizeof(T)> (&to)[VECTORS], const T* columns, const Slice& slice) {
    constexpr int WIDTH = 16 / sizeof(T);
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i < slice.count) to[k] = Vector<T, WIDTH>::load(columns + (long long)(slice.first + i) * WIDTH);
    }
}
