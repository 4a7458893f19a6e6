// What kernels share whose every element of the results depends on the same element of each argument.
#pragma once
#include "vectors.cuh"

__device__ inline float power_of_e(float x) { return __expf(x); }
__device__ inline double power_of_e(double x) { return exp(x); }

// One thread owns WIDTH consecutive elements, or the last ones. `of` takes an element of each argument and gives one of
// each result. A result that is not wanted has the address 0.
template <int WIDTH, class T, int TAKEN, int GIVEN, class Of>
__device__ void elementwise(const T* const (&taken)[TAKEN], T* const (&given)[GIVEN], long long n, Of of) {
    const long long first = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * WIDTH;
    if (first >= n) return;
    const bool whole = first + WIDTH <= n;
    Vector<T, WIDTH> in[TAKEN], out[GIVEN];
#pragma unroll
    for (int k = 0; k < TAKEN; k++)
        if (whole) in[k] = Vector<T, WIDTH>::load(taken[k] + first);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        if (!whole && first + j >= n) break;
        Compute<T> x[TAKEN], y[GIVEN];
#pragma unroll
        for (int k = 0; k < TAKEN; k++) x[k] = Compute<T>(whole ? in[k].at[j] : taken[k][first + j]);
        of(x, y);
#pragma unroll
        for (int k = 0; k < GIVEN; k++) {
            out[k].at[j] = T(y[k]);
            if (!whole && given[k]) given[k][first + j] = out[k].at[j];
        }
    }
#pragma unroll
    for (int k = 0; k < GIVEN; k++)
        if (whole && given[k]) out[k].store(given[k] + first);
}
