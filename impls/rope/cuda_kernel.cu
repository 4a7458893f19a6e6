#include "rows.cuh"

// The blocks of a multiprocessor bound the registers, so that as many warps wait for memory together.
template <class T, int WIDTH, bool INTERLEAVED>
__global__ void __launch_bounds__(128, WIDTH == 1 ? 16 : WIDTH == 8 ? 10 : 12) rope_kernel(
    const T* __restrict__ x,                  // [outer, inner, heads, dim], strided
    const T* __restrict__ cos,                // [num_positions, half], strided
    const T* __restrict__ sin,                // [num_positions, half], strided
    const long long* __restrict__ positions,  // [tokens], strided, or null: each token's place in its sequence
    T* __restrict__ output,                   // [tokens, heads, dim]
    long long tokens, long long seq, long long num_positions, unsigned heads, unsigned dim, unsigned half,
    long long inner, long long x_outer_stride, long long x_inner_stride, long long x_head_stride, long long x_stride,
    long long cos_row_stride, long long cos_stride, long long sin_row_stride, long long sin_stride,
    long long position_stride, long long seq_reciprocal, bool back) {
    // One thread owns WIDTH pairs of a token, or WIDTH elements that have no partner, in some of its heads. A block has no
    // more threads along x and y than there are of these and of heads.
    using C = Compute<T>;
    const long long token = blockIdx.x * (long long)blockDim.z + threadIdx.z;
    if (token >= tokens) return;
    output += token * heads * dim;
    long long position;
    if (positions) {
        position = positions[token * position_stride];
        if (position < 0 || position >= num_positions) {
            for (unsigned head = threadIdx.y; head < heads; head += blockDim.y)
                for (unsigned column = threadIdx.x; column < dim; column += blockDim.x)
                    output[(long long)head * dim + column] = T(__int_as_float(0x7fffffff));  // NaN
            return;
        }
    } else {
        position = divided(token, seq, seq_reciprocal).rest;
    }
    x += row_offset(token, inner, x_outer_stride, x_inner_stride);
    cos += position * cos_row_stride;
    sin += position * sin_row_stride;
    const C sign = back ? -1 : 1;
    unsigned head = threadIdx.y;
    do {
        const T* const from = x + head * x_head_stride;
        T* const to = output + (long long)head * dim;
        for (unsigned slot = threadIdx.x; slot < half / WIDTH; slot += blockDim.x) {
            const unsigned columns[] = {(INTERLEAVED ? 2 * slot : slot) * WIDTH,
                                        INTERLEAVED ? (2 * slot + 1) * WIDTH : half + slot * WIDTH};
            // The angles are loaded again for each head, to wait together with its elements.
            const Vector<T, WIDTH> loaded[] = {
                take<WIDTH>(cos, slot * WIDTH, cos_stride), take<WIDTH>(sin, slot * WIDTH, sin_stride),
                take<WIDTH>(from, columns[0], x_stride), take<WIDTH>(from, columns[1], x_stride)};
            Vector<T, WIDTH> turned[2];
            C c[WIDTH], s[WIDTH], of[2][WIDTH];
            loaded[0].unpack(c);
            loaded[1].unpack(s);
            loaded[2].unpack(of[0]);
            loaded[3].unpack(of[1]);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                // Of interleaved vectors each holds whole pairs, else the first the one half and the second the other.
                const int at = INTERLEAVED ? 2 * j : j, partner = INTERLEAVED ? 2 * j + 1 : j + WIDTH;
                const C first = of[at / WIDTH][at % WIDTH], second = of[partner / WIDTH][partner % WIDTH];
                const C sine = sign * s[j];
                turned[at / WIDTH].at[at % WIDTH] = T(fma(first, c[j], -(second * sine)));
                turned[partner / WIDTH].at[partner % WIDTH] = T(fma(first, sine, second * c[j]));
            }
#pragma unroll
            for (int k = 0; k < 2; k++) turned[k].store(to + columns[k]);
        }
    } while ((head += blockDim.y) < heads);
    // The elements without a partner belong to the last threads.
    for (int column = dim - (blockDim.x - threadIdx.x) * WIDTH; column >= int(2 * half); column -= blockDim.x * WIDTH)
        for (head = threadIdx.y; head < heads; head += blockDim.y)
            take<WIDTH>(x + head * x_head_stride, column, x_stride).store(output + (long long)head * dim + column);
}
