// Where the tiles of attention's kernels lie in a batch of packed sequences.
#pragma once

// The tokens of one side, queries or keys, of the sequences of a batch.
struct Tokens {
    const void* offsets;  // [batch + 1], or null: there is one sequence
    bool wide;            // int64, else int32
    long long batch, total;

    __device__ long long operator[](long long sequence) const {
        if (!offsets) return sequence ? total : 0;
        return wide ? __ldg(static_cast<const long long*>(offsets) + sequence)
                    : __ldg(static_cast<const int*>(offsets) + sequence);
    }
    // Whether, as far as the thread looks, the offsets do not rise from 0 to the total.
    __device__ bool fall() const {
        bool falls = (*this)[0] != 0 || (*this)[batch] != total;
        for (long long i = threadIdx.x; i < batch; i += blockDim.x) falls |= (*this)[i + 1] < (*this)[i];
        return falls;
    }
    // The sequence of a tile: the last one whose first tile, offsets[s] / rows + s, is not after it.
    __device__ long long sequence_of(long long tile, int rows) const {
        long long low = 0;
        for (long long left = batch; left > 1;) {
            const long long half = left / 2;
            if ((*this)[low + half] / rows + low + half <= tile) low += half;
            left -= half;
        }
        return low;
    }
};

// Where a block's tile lies: its first row in its sequence, begin and length of that, of its own tokens and of the
// others'. A sequence has less than 2^31 tokens. Invalid offsets are taken for one sequence without others, all of whose results are NaN.
struct Place {
    long long begin, other_begin;
    int first, length, other_length;
    bool fits;

    __device__ Place(long long tile, int rows, const Tokens& own, const Tokens& others) {
        fits = !own.offsets || !__syncthreads_or(own.fall() || others.fall());
        const long long sequence = fits ? own.sequence_of(tile, rows) : 0;
        begin = fits ? own[sequence] : 0;
        length = int(fits ? own[sequence + 1] - begin : own.total);
        other_begin = fits ? others[sequence] : 0;
        other_length = fits ? int(others[sequence + 1] - other_begin) : 0;
        // Of tiles that no sequence needs it may be past 2^31.
        first = int(min((fits ? tile - (begin / rows + sequence) : tile) * rows, (long long)length));
    }
};

// The distance of a thread's element e of its part n of a warp's sums, if the query of its first one is this many places
// past the key. Integers are converted slowly, so there is one conversion for all elements.
template <class C> __device__ C distance(C past, int n, int e) { return abs(past - C(n * 8 + e % 2 - e / 2 * 8)); }

// The maximum, or the sum, over the four lanes that hold a row.
template <class C> __device__ C largest_of_row(C x) {
    x = max(x, __shfl_xor_sync(~0u, x, 1));
    return max(x, __shfl_xor_sync(~0u, x, 2));
}
template <class C> __device__ C sum_of_row(C x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
