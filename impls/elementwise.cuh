// What kernels share whose every element of the results depends on the same element of each argument.
#pragma once
#include "vectors.cuh"

__device__ inline float power_of_e(float x) { return __expf(x); }
__device__ inline double power_of_e(double x) { return exp(x); }

// a / b within 2 ulp, for b of 2^-120 to 2^120: without the branches that the division of all numbers has.
__device__ inline float ratio(float a, float b) { return __fdividef(a, b); }
__device__ inline double ratio(double a, double b) { return a / b; }

// sigmoid(x), and sigmoid(-x) as `rest`, each to all its digits.
template <class C> __device__ C sigmoid(C x, C& rest) {
    const C power = power_of_e(-fabs(x)), larger = C(1) / (C(1) + power);
    rest = x < C(0) ? larger : power * larger;
    return x < C(0) ? power * larger : larger;
}

// Threads of a block of the kernels below. A constant makes the distances between a thread's vectors constant, too.
constexpr int BLOCK_THREADS = 256;

// One block owns `owned` * BLOCK_THREADS consecutive vectors, one thread every BLOCK_THREADS-th; `owned` is at most VECTORS,
// and given by the host, because a thread waits for the size of the grid. The last block also owns the rest. `of` takes an
// element of each argument and gives one of each result. Unless ALL are, a result that is not wanted has the address 0. A
// thread loads all its vectors of each argument before it uses the first: enough in flight to keep the memory busy.
template <int WIDTH, class T, int VECTORS = 2, bool ALL = false, int TAKEN, int GIVEN, class Of>
__device__ void elementwise(
    const T* const (&taken)[TAKEN], T* const (&given)[GIVEN], long long n, int owned, Of of) {
    using C = Compute<T>;
    const long long num_vectors = n / WIDTH;
    const long long first = blockIdx.x * (long long)(owned * BLOCK_THREADS) + threadIdx.x;
    Vector<T, WIDTH> in[VECTORS][TAKEN];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const long long i = first + v * BLOCK_THREADS;
        if (v >= owned || i >= num_vectors) continue;
#pragma unroll
        for (int k = 0; k < TAKEN; k++) in[v][k] = Vector<T, WIDTH>::load(taken[k] + i * WIDTH);
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const long long i = first + v * BLOCK_THREADS;
        if (v >= owned || i >= num_vectors) continue;
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
            if (ALL || given[k]) out[k].store(given[k] + i * WIDTH);
    }
    if (WIDTH == 1) return;
    const long long odd = num_vectors * WIDTH + threadIdx.x;
    if (odd >= n || blockIdx.x < gridDim.x - 1) return;
    C x[TAKEN], y[GIVEN];
#pragma unroll
    for (int k = 0; k < TAKEN; k++) x[k] = C(taken[k][odd]);
    of(x, y);
#pragma unroll
    for (int k = 0; k < GIVEN; k++)
        if (ALL || given[k]) given[k][odd] = T(y[k]);
}

// of(a, b) of two tensors that lie alike. `Of` has `operator()`, which takes and gives elements.
template <class Of, class T, int WIDTH, int VECTORS>
__global__ void __launch_bounds__(BLOCK_THREADS) binary_kernel(
    long long n, int owned,
    const T* __restrict__ a,   // [n]
    const T* __restrict__ b,   // [n]
    T* __restrict__ output) {  // [n]
    // One block owns `owned` * BLOCK_THREADS consecutive vectors, up to VECTORS a thread.
    using C = Compute<T>;
    elementwise<WIDTH, T, VECTORS, true>({a, b}, {output}, n, owned,
                                         [](const C(&x)[2], C(&y)[1]) { y[0] = Of()(x[0], x[1]); });
}

// of(a, b) in the memory order of the output. Index: the type of an element's number in it. 32 bits where they suffice,
// because divisions are then cheaper.
template <class Of, class T, class Index, int VECTORS>
__global__ void __launch_bounds__(BLOCK_THREADS) binary_strided_kernel(
    const T* __restrict__ a,  // [outer, middle, inner], strided
    const T* __restrict__ b,  // [outer, middle, inner], strided
    T* __restrict__ output,   // [outer * middle * inner]
    long long n, long long middle, long long inner, long long a_outer_stride, long long a_middle_stride,
    long long a_inner_stride, long long b_outer_stride, long long b_middle_stride, long long b_inner_stride) {
    // One block owns VECTORS * BLOCK_THREADS consecutive elements of the output, one thread every BLOCK_THREADS-th.
    using C = Compute<T>;
    const long long first = blockIdx.x * (long long)(VECTORS * BLOCK_THREADS) + threadIdx.x;
    C results[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const long long i = first + k * BLOCK_THREADS;
        if (i < n) {
            const Index row = Index(i) / Index(inner), column = Index(i) - row * Index(inner);
            const Index plane = row / Index(middle), line = row - plane * Index(middle);
            results[k] = Of()(C(a[plane * a_outer_stride + line * a_middle_stride + column * a_inner_stride]),
                              C(b[plane * b_outer_stride + line * b_middle_stride + column * b_inner_stride]));
        }
    }
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const long long i = first + k * BLOCK_THREADS;
        if (i < n) output[i] = T(results[k]);
    }
}

// The needed gradients, which `Of` writes last: of(grad_output, a, b, grad_a, grad_b).
template <class Of, class T, int WIDTH, int VECTORS>
__global__ void __launch_bounds__(BLOCK_THREADS) binary_gradients_kernel(
    long long n, int owned, bool needs_a, bool needs_b,
    const T* __restrict__ grad_output,  // [n]
    const T* __restrict__ a,            // [n]
    const T* __restrict__ b,            // [n]
    T* __restrict__ grad_a,             // [n], not written unless needed
    T* __restrict__ grad_b) {           // [n]
    // One block owns `owned` * BLOCK_THREADS consecutive vectors, up to VECTORS a thread.
    using C = Compute<T>;
    T* const wanted[] = {needs_a ? grad_a : nullptr, needs_b ? grad_b : nullptr};
    elementwise<WIDTH, T, VECTORS>({grad_output, a, b}, wanted, n, owned,
                                   [](const C(&x)[3], C(&y)[2]) { Of()(x[0], x[1], x[2], y[0], y[1]); });
}
