// Rows that the blocks of a cluster share, on GPUs of compute capability 9.0 or later. Elsewhere a cluster has one block.
#pragma once
#if __CUDA_ARCH__ >= 900
#include "mbarriers.cuh"

// The address of an own variable in another block's shared memory.
__device__ inline unsigned in_block(unsigned own, int block) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(block));
    return there;
}
__device__ inline void store(unsigned to, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
__device__ inline void store(unsigned to, double value) {
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(to), "d"(value) : "memory");
}
// Stores a number in another block's shared memory, and counts its bytes at that block's mbarrier.
__device__ inline void send(unsigned to, float value, unsigned barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
        ::"r"(to), "r"(__float_as_uint(value)), "r"(barrier) : "memory");
}
__device__ inline void send(unsigned to, double value, unsigned barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];"
        ::"r"(to), "l"(__double_as_longlong(value)), "r"(barrier) : "memory");
}

#define CLUSTER_REGISTER(function, name)                        \
    __device__ inline int function() {                          \
        int value;                                              \
        asm("mov.u32 %0, %%" name ";" : "=r"(value));           \
        return value;                                           \
    }
CLUSTER_REGISTER(cluster_id, "clusterid.x")
CLUSTER_REGISTER(num_clusters, "nclusterid.x")
CLUSTER_REGISTER(block_in_cluster, "cluster_ctarank")
CLUSTER_REGISTER(blocks_in_cluster, "cluster_nctarank")
#undef CLUSTER_REGISTER
#else
__device__ inline int cluster_id() { return blockIdx.x; }
__device__ inline int num_clusters() { return gridDim.x; }
__device__ inline int block_in_cluster() { return 0; }
__device__ inline int blocks_in_cluster() { return 1; }
#endif

constexpr int MAX_BLOCKS = 16;  // per cluster

// COUNT numbers that the blocks of a cluster send each other, again and again. An mbarrier counts the bytes that arrive.
// With ORDERED, a barrier of the cluster waits for them, and also for all former stores of its threads. That keeps blocks
// together that walk through many rows, which is faster; a block of one row would wait before the next one loads.
template <class C, int COUNT, bool ORDERED = false> struct Exchange {
    C (*received)[COUNT][MAX_BLOCKS];  // of two turns
    unsigned long long* barriers;      // of two turns
    int parities = 0;                  // a bit of each turn

    __device__ Exchange(int blocks) {
        __shared__ C of_blocks[2][COUNT][MAX_BLOCKS];
        __shared__ unsigned long long of_turns[2];
        received = of_blocks;
        barriers = of_turns;
#if __CUDA_ARCH__ >= 900
        if (blocks == 1) return;
        if constexpr (ORDERED) {
            arrive();
        } else {
            if (threadIdx.x == 0) {
                for (int turn = 0; turn < 2; turn++) barrier_init(shared_address(barriers + turn), 1);
                fence_mbarrier_init();
            }
            asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
        }
#endif
    }

    // Waits until all blocks of the cluster have begun, once, before the first exchange.
    __device__ void wait_for_blocks() const {
        if (blocks_in_cluster() > 1) wait();
    }

    // Replaces the numbers, the same in all threads, by those of block `threadIdx.x % MAX_BLOCKS`; returns whether there is
    // one. Calls alternate between `turn` 0 and 1, and between two calls the threads of a block wait for each other: who
    // sends has received the other turn's numbers, before which all had read this turn's.
    __device__ bool gather(C (&values)[COUNT], int turn = 0) {
        const int lane = threadIdx.x % MAX_BLOCKS, blocks = blocks_in_cluster();
#if __CUDA_ARCH__ >= 900
        const unsigned barrier = shared_address(barriers + turn);
        if (!ORDERED && threadIdx.x == 0) barrier_arrive_expecting(barrier, blocks * sizeof(values));
        if (threadIdx.x < blocks)
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const unsigned to = in_block(shared_address(&received[turn][i][block_in_cluster()]), threadIdx.x);
                if constexpr (ORDERED) store(to, values[i]);
                else send(to, values[i], in_block(barrier, threadIdx.x));
            }
        if constexpr (ORDERED) {
            arrive();
            wait();
        } else {
            barrier_wait(barrier, parities >> turn & 1);
            parities ^= 1 << turn;
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) values[i] = received[turn][i][lane];
#endif
        return lane < blocks;
    }

    // Sums the numbers over the blocks, in all threads.
    __device__ void add(C (&values)[COUNT], int turn = 0) {
        const bool exists = gather(values, turn);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (!exists) values[i] = 0;
#pragma unroll
            for (int step = MAX_BLOCKS / 2; step; step /= 2) values[i] += __shfl_xor_sync(~0u, values[i], step);
        }
    }
    __device__ C sum(C value, int turn = 0) {
        static_assert(COUNT == 1, "one number");
        C values[] = {value};
        add(values, turn);
        return values[0];
    }

private:
    __device__ static void arrive() {
#if __CUDA_ARCH__ >= 900
        asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
    }
    __device__ static void wait() {
#if __CUDA_ARCH__ >= 900
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
    }
};
