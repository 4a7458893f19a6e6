// Of CUB: reductions over a block and over a warp. A result is that of thread 0 alone, as CUB promises.
#pragma once
#include "../cooperative_groups/reduce.h"

namespace cub {

struct Sum { template <class T> FOURFOLD_INLINE T operator()(T a, T b) const { return a + b; } };
struct Max { template <class T> FOURFOLD_INLINE T operator()(T a, T b) const { return a < b ? b : a; } };
struct Min { template <class T> FOURFOLD_INLINE T operator()(T a, T b) const { return b < a ? b : a; } };
enum BlockReduceAlgorithm { BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY, BLOCK_REDUCE_RAKING, BLOCK_REDUCE_WARP_REDUCTIONS };

template <class T, int X, BlockReduceAlgorithm = BLOCK_REDUCE_WARP_REDUCTIONS, int Y = 1, int Z = 1> class BlockReduce {
public:
    struct TempStorage {
        T values[X * Y * Z];
    };
    FOURFOLD_INLINE explicit BlockReduce(TempStorage& storage) : storage(storage) {}
    template <class Op> FOURFOLD_INLINE T Reduce(T v, Op op, int valid, FOURFOLD_SITE) {
        const unsigned rank = cooperative_groups::details::thread_rank();
        storage.values[rank] = v;
        __syncthreads(site);
        if (rank) return fourfold::undefined_value<T>();
        for (int i = 1; i < valid; i++) v = op(v, storage.values[i]);
        return v;
    }
    template <class Op> FOURFOLD_INLINE T Reduce(T v, Op op, FOURFOLD_SITE) { return Reduce(v, op, X * Y * Z, site); }
    FOURFOLD_INLINE T Sum(T v, FOURFOLD_SITE) { return Reduce(v, cub::Sum(), site); }

private:
    TempStorage& storage;
};

template <class T, int N = 32> class WarpReduce {
public:
    struct TempStorage {};
    FOURFOLD_INLINE explicit WarpReduce(TempStorage&) {}
    template <class Op> FOURFOLD_INLINE T Reduce(T v, Op op, FOURFOLD_SITE) {
        return cooperative_groups::reduce(cooperative_groups::thread_block_tile<N>(), v, op, site);
    }
    FOURFOLD_INLINE T Sum(T v, FOURFOLD_SITE) { return Reduce(v, cub::Sum(), site); }
};

}  // namespace cub
