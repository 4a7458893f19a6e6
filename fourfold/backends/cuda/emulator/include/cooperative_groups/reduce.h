// cooperative_groups::reduce over a tile, and the operators for it.
#pragma once
#include "../cooperative_groups.h"

namespace cooperative_groups {

template <class T> struct plus { FOURFOLD_INLINE T operator()(T a, T b) const { return a + b; } };
template <class T> struct less { FOURFOLD_INLINE T operator()(T a, T b) const { return b < a ? b : a; } };
template <class T> struct greater { FOURFOLD_INLINE T operator()(T a, T b) const { return a < b ? b : a; } };
template <class T> struct bit_and { FOURFOLD_INLINE T operator()(T a, T b) const { return a & b; } };
template <class T> struct bit_or { FOURFOLD_INLINE T operator()(T a, T b) const { return a | b; } };
template <class T> struct bit_xor { FOURFOLD_INLINE T operator()(T a, T b) const { return a ^ b; } };

template <unsigned N, class Parent, class T, class Op>
FOURFOLD_INLINE T reduce(const thread_block_tile<N, Parent>& tile, T v, Op op, FOURFOLD_SITE) {
    const unsigned present = __builtin_popcount(tile.mask());
    if (present == N) {
        for (unsigned lanes = N / 2; lanes; lanes /= 2) v = op(v, tile.shfl_xor(v, int(lanes), site));
        return v;
    }
    T total = tile.shfl(v, 0, site);
    for (unsigned lane = 1; lane < present; lane++) total = op(total, tile.shfl(v, int(lane), site));
    return total;
}

}  // namespace cooperative_groups
