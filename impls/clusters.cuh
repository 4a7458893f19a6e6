// Rows that the blocks of a cluster share, on GPUs of compute capability 9.0 or later. Elsewhere a cluster has one block.
#pragma once

constexpr int MAX_BLOCKS = 16;  // per cluster

// The barriers of a cluster's blocks. Each block must have begun before another writes to its shared memory, and all
// must have written before one reads. A block arrives early and waits later, so as not to idle.
#if __CUDA_ARCH__ >= 900
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ inline unsigned in_block(const void* own, int block) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(unsigned(__cvta_generic_to_shared(own))), "r"(block));
    return there;
}
__device__ inline void store_in_block(float* own, int block, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(in_block(own, block)), "f"(value) : "memory");
}
__device__ inline void store_in_block(double* own, int block, double value) {
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(in_block(own, block)), "d"(value) : "memory");
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
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_wait() {}
template <class C> __device__ inline void store_in_block(C* own, int, C value) { *own = value; }
__device__ inline int cluster_id() { return blockIdx.x; }
__device__ inline int num_clusters() { return gridDim.x; }
__device__ inline int block_in_cluster() { return 0; }
__device__ inline int blocks_in_cluster() { return 1; }
#endif

// Sums values over the blocks of a cluster, each of which must have begun, in all threads. Calls alternate between `turn`
// 0 and 1: who writes has passed the other turn's barrier, before which all had read this turn's.
template <class C, int COUNT> __device__ inline void add_over_blocks(C (&values)[COUNT], int block, int blocks, int turn) {
    __shared__ C of_blocks[2][COUNT][MAX_BLOCKS];
    if (threadIdx.x < blocks)
#pragma unroll
        for (int i = 0; i < COUNT; i++) store_in_block(&of_blocks[turn][i][block], threadIdx.x, values[i]);
    cluster_arrive();
    cluster_wait();
    const int lane = threadIdx.x % MAX_BLOCKS;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        values[i] = lane < blocks ? of_blocks[turn][i][lane] : C(0);
#pragma unroll
        for (int step = MAX_BLOCKS / 2; step; step /= 2) values[i] += __shfl_xor_sync(~0u, values[i], step);
    }
}
template <class C> __device__ inline C sum_of_blocks(C value, int block, int blocks, int turn = 0) {
    C values[] = {value};
    add_over_blocks(values, block, blocks, turn);
    return values[0];
}
