// Cooperative groups of a block: the block itself, and tiles of up to 32 threads. Groups of several blocks are missing.
#pragma once

namespace cooperative_groups {
namespace details {
inline unsigned thread_rank() { return fourfold::here.warp * 32 + fourfold::here.lane; }
inline unsigned block_threads() { return blockDim.x * blockDim.y * blockDim.z; }
}  // namespace details

class thread_block {
public:
    static unsigned thread_rank() { return details::thread_rank(); }
    static unsigned size() { return details::block_threads(); }
    static unsigned num_threads() { return details::block_threads(); }
    static dim3 group_index() { return dim3(blockIdx.x, blockIdx.y, blockIdx.z); }
    static dim3 thread_index() { return dim3(threadIdx.x, threadIdx.y, threadIdx.z); }
    static dim3 group_dim() { return dim3(blockDim.x, blockDim.y, blockDim.z); }
    static dim3 dim_threads() { return group_dim(); }
    FOURFOLD_INLINE static void sync(FOURFOLD_SITE) { __syncthreads(site); }
};
inline thread_block this_thread_block() { return {}; }

template <unsigned N, class Parent = thread_block> class thread_block_tile {
    static_assert(N && N <= 32 && (N & (N - 1)) == 0, "on the CPU a tile has 1, 2, 4, 8, 16 or 32 threads");

public:
    static unsigned thread_rank() { return fourfold::here.lane % N; }
    static constexpr unsigned size() { return N; }
    static constexpr unsigned num_threads() { return N; }
    static unsigned meta_group_rank() { return details::thread_rank() / N; }
    static unsigned meta_group_size() { return (details::block_threads() + N - 1) / N; }
    // The lanes of the tile, without those that the block's last warp lacks.
    static unsigned mask() {
        unsigned first = fourfold::here.lane / N * N, in_warp = details::block_threads() - fourfold::here.warp * 32;
        unsigned lanes = (N == 32 ? ~0u : (1u << N % 32) - 1) << first;
        return in_warp < 32 ? lanes & ((1u << in_warp) - 1) : lanes;
    }
    FOURFOLD_INLINE static void sync(FOURFOLD_SITE) { __syncwarp(mask(), site); }
    template <class T> FOURFOLD_INLINE T shfl(T v, int from, FOURFOLD_SITE) const { return __shfl_sync(mask(), v, from, N, site); }
    template <class T> FOURFOLD_INLINE T shfl_up(T v, unsigned delta, FOURFOLD_SITE) const { return __shfl_up_sync(mask(), v, delta, N, site); }
    template <class T> FOURFOLD_INLINE T shfl_down(T v, unsigned delta, FOURFOLD_SITE) const { return __shfl_down_sync(mask(), v, delta, N, site); }
    template <class T> FOURFOLD_INLINE T shfl_xor(T v, int lanes, FOURFOLD_SITE) const { return __shfl_xor_sync(mask(), v, lanes, N, site); }
    FOURFOLD_INLINE int any(int predicate, FOURFOLD_SITE) const { return __any_sync(mask(), predicate, site); }
    FOURFOLD_INLINE int all(int predicate, FOURFOLD_SITE) const { return __all_sync(mask(), predicate, site); }
    FOURFOLD_INLINE unsigned ballot(int predicate, FOURFOLD_SITE) const {
        return __ballot_sync(mask(), predicate, site) >> (fourfold::here.lane / N * N);
    }
};
template <unsigned N, class Parent> thread_block_tile<N, Parent> tiled_partition(const Parent&) { return {}; }
template <class Group> FOURFOLD_INLINE void sync(const Group& group, FOURFOLD_SITE) { group.sync(site); }

}  // namespace cooperative_groups
