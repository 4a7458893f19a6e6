// How the kernels for compute capability 9.0 store a result [m, n].
#pragma once
#include "vectors.cuh"

// Stores a thread's results as wgmma has them: in `row` and 8 rows later, two of every 8 of 2 * COUNT columns from
// `column` on. Neighbouring lanes exchange pairs, so that each has 4 columns in one row.
template <class T, int COUNT>
__device__ inline void store_sums(const float (&sums)[COUNT], T* __restrict__ c, long long row, long long column,
                                  long long m, long long n) {
    const bool odd = threadIdx.x % 2;
    row += odd ? 8 : 0, column += threadIdx.x % 4 / 2 * 4;
#pragma unroll
    for (int i = 0; i < COUNT; i += 4, column += 8) {
        Vector<T, 4> results;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            // As values: a choice between two places would move all sums to local memory.
            const float first = sums[i + e], second = sums[i + 2 + e];
            const float other = __shfl_xor_sync(~0u, odd ? first : second, 1);
            results.at[e] = T(odd ? other : first);
            results.at[2 + e] = T(odd ? second : other);
        }
        if (row >= m) continue;
        T* to = c + row * n + column;
        if (n % 4 == 0 && column < n) {
            results.store(to);
            continue;
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (column + e < n) to[e] = results.at[e];
    }
}
