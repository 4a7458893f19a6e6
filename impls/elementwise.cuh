// What kernels share whose every element of the results depends on the same element of each argument.
#pragma once
#include "vectors.cuh"

__device__ inline float power_of_e(float x) { return __expf(x); }
__device__ inline double power_of_e(double x) { return exp(x); }

// Vectors of each argument that a thread loads before it uses the first: enough in flight to keep the memory busy.
constexpr int VECTORS = 2;

// One block owns VECTORS * blockDim.x consecutive vectors, one thread every blockDim.x-th. The last block also owns the
// rest. `of` takes an element of each argument and gives one of each result. A result that is not wanted has the
// address 0.
template <int WIDTH, class T, int TAKEN, int GIVEN, class Of>
__device__ void elementwise(const T* const (&taken)[TAKEN], T* const (&given)[GIVEN], long long n, Of of) {
    using C = Compute<T>;
    const long long num_vectors = n / WIDTH, first = blockIdx.x * (long long)(VECTORS * blockDim.x) + threadIdx.x;
    Vector<T, WIDTH> in[VECTORS][TAKEN];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const long long i = first + v * blockDim.x;
        if (i >= num_vectors) break;
#pragma unroll
        for (int k = 0; k < TAKEN; k++) in[v][k] = Vector<T, WIDTH>::load(taken[k] + i * WIDTH);
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const long long i = first + v * blockDim.x;
        if (i >= num_vectors) break;
        C x[TAKEN][WIDTH];
        Vector<T, WIDTH> out[GIVEN];
#pragma unroll
        for (int k = 0; k < TAKEN; k++) in[v][k].unpack(x[k]);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            C each[TAKEN], y[GIVEN];
#pragma unroll
            for (int k = 0; k < TAKEN; k++) each[k] = x[k][j];
            of(each, y);
#pragma unroll
            for (int k = 0; k < GIVEN; k++) out[k].at[j] = T(y[k]);
        }
#pragma unroll
        for (int k = 0; k < GIVEN; k++)
            if (given[k]) out[k].store(given[k] + i * WIDTH);
    }
    const long long odd = num_vectors * WIDTH + threadIdx.x;
    if (blockIdx.x < gridDim.x - 1 || odd >= n) return;
    C x[TAKEN], y[GIVEN];
#pragma unroll
    for (int k = 0; k < TAKEN; k++) x[k] = C(taken[k][odd]);
    of(x, y);
#pragma unroll
    for (int k = 0; k < GIVEN; k++)
        if (given[k]) given[k][odd] = T(y[k]);
}
