#include "vectors.cuh"

constexpr int BLOCK = 256;
// Vectors of each input that a thread loads before it uses the first: enough in flight to keep the memory busy.
constexpr int VECTORS = 4;

template <class T, int WIDTH>
__global__ void __launch_bounds__(BLOCK) vector_add_kernel(
    const T* __restrict__ x,  // [n]
    const T* __restrict__ y,  // [n]
    T* __restrict__ output,   // [n]
    long long n) {
    // One block owns VECTORS * BLOCK consecutive vectors, one thread every BLOCK-th. The last block also adds the rest.
    using C = Compute<T>;
    const long long num_vectors = n / WIDTH, first = blockIdx.x * (long long)(VECTORS * BLOCK) + threadIdx.x;
    Vector<T, WIDTH> a[VECTORS], b[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const long long i = first + k * BLOCK;
        if (i < num_vectors) {
            a[k] = Vector<T, WIDTH>::load(x + i * WIDTH);
            b[k] = Vector<T, WIDTH>::load(y + i * WIDTH);
        }
    }
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const long long i = first + k * BLOCK;
        if (i >= num_vectors) continue;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) a[k].at[j] = T(C(a[k].at[j]) + C(b[k].at[j]));
        a[k].store(output + i * WIDTH);
    }
    const long long odd = num_vectors * WIDTH + threadIdx.x;
    if (blockIdx.x == gridDim.x - 1 && odd < n) output[odd] = T(C(x[odd]) + C(y[odd]));
}

// Index: the type of an element's number in the output. 32 bits where they suffice, because divisions are then cheaper.
template <class T, class Index>
__global__ void __launch_bounds__(BLOCK) vector_add_strided_kernel(
    const T* __restrict__ x,  // [outer, middle, inner], strided
    const T* __restrict__ y,  // [outer, middle, inner], strided
    T* __restrict__ output,   // [outer * middle * inner]
    long long n, long long middle, long long inner, long long x_outer_stride, long long x_middle_stride,
    long long x_inner_stride, long long y_outer_stride, long long y_middle_stride, long long y_inner_stride) {
    // One block owns VECTORS * BLOCK consecutive elements of the output, one thread every BLOCK-th.
    using C = Compute<T>;
    const long long first = blockIdx.x * (long long)(VECTORS * BLOCK) + threadIdx.x;
    C sum[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const long long i = first + k * BLOCK;
        if (i < n) {
            const Index row = Index(i) / Index(inner), column = Index(i) - row * Index(inner);
            const Index plane = row / Index(middle), line = row - plane * Index(middle);
            sum[k] = C(x[plane * x_outer_stride + line * x_middle_stride + column * x_inner_stride]) +
                     C(y[plane * y_outer_stride + line * y_middle_stride + column * y_inner_stride]);
        }
    }
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const long long i = first + k * BLOCK;
        if (i < n) output[i] = T(sum[k]);
    }
}
