#include "rows.cuh"

template <class T, int WIDTH, bool INTERLEAVED>
__global__ void rope_kernel(
    const T* __restrict__ x,                  // [outer, inner, heads, dim], strided
    const T* __restrict__ cos,                // [num_positions, half], strided
    const T* __restrict__ sin,                // [num_positions, half], strided
    const long long* __restrict__ positions,  // [tokens], strided, or null: each token's place in its sequence
    T* __restrict__ output,                   // [tokens, heads, dim]
    long long tokens, long long seq, long long num_positions, int heads, int dim, int half, long long inner,
    long long x_outer_stride, long long x_inner_stride, long long x_head_stride, long long x_stride,
    long long cos_row_stride, long long cos_stride, long long sin_row_stride, long long sin_stride,
    long long position_stride, bool back) {
    // One thread owns WIDTH pairs of a token, or WIDTH elements that have no partner, in some of its heads.
    using C = Compute<T>;
    const long long token = blockIdx.x * (long long)blockDim.z + threadIdx.z;
    if (token >= tokens) return;
    const long long position = positions ? positions[token * position_stride] : token % seq;
    const bool known = position >= 0 && position < num_positions;
    const T unknown(__int_as_float(0x7fffffff));  // NaN
    x += row_offset(token, inner, x_outer_stride, x_inner_stride);
    output += token * heads * dim;
    const int pairs = half / WIDTH, slots = pairs + (dim - 2 * half) / WIDTH;
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        if (slot >= pairs) {
            const int column = (slot + pairs) * WIDTH;
            for (int head = threadIdx.y; head < heads; head += blockDim.y) {
                auto alone = take<WIDTH>(x + head * x_head_stride, column, x_stride);
#pragma unroll
                for (int j = 0; j < WIDTH; j++)
                    if (!known) alone.at[j] = unknown;
                alone.store(output + (long long)head * dim + column);
            }
            continue;
        }
        C c[WIDTH] = {}, s[WIDTH] = {};
        if (known) {
            take<WIDTH>(cos + position * cos_row_stride, slot * WIDTH, cos_stride).unpack(c);
            take<WIDTH>(sin + position * sin_row_stride, slot * WIDTH, sin_stride).unpack(s);
        }
        const int columns[] = {(INTERLEAVED ? 2 * slot : slot) * WIDTH,
                               INTERLEAVED ? (2 * slot + 1) * WIDTH : half + slot * WIDTH};
        for (int head = threadIdx.y; head < heads; head += blockDim.y) {
            Vector<T, WIDTH> turned[2];
            C of[2][WIDTH];
#pragma unroll
            for (int k = 0; k < 2; k++) take<WIDTH>(x + head * x_head_stride, columns[k], x_stride).unpack(of[k]);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                // Of interleaved vectors each holds whole pairs, else the first the one half and the second the other.
                const int at = INTERLEAVED ? 2 * j : j, partner = INTERLEAVED ? 2 * j + 1 : j + WIDTH;
                const C first = of[at / WIDTH][at % WIDTH], second = of[partner / WIDTH][partner % WIDTH];
                const C sine = back ? -s[j] : s[j];
                turned[at / WIDTH].at[at % WIDTH] = known ? T(first * c[j] - second * sine) : unknown;
                turned[partner / WIDTH].at[partner % WIDTH] = known ? T(second * c[j] + first * sine) : unknown;
            }
#pragma unroll
            for (int k = 0; k < 2; k++) turned[k].store(output + (long long)head * dim + columns[k]);
        }
    }
}
