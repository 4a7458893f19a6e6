#include "elementwise.cuh"

// Within 1 ulp, without the branch that the exact root has.
__device__ inline float root_of(float x) {
#ifdef CUDA_ON_CPU
    return sqrtf(x);
#else
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
#endif
}
__device__ inline double root_of(double x) { return sqrt(x); }

template <class T, int WIDTH>
__global__ void __launch_bounds__(BLOCK_THREADS) adam_kernel(
    long long n,
    T* __restrict__ param,       // [n]
    const T* __restrict__ grad,  // [n]
    float* __restrict__ m,       // [n]
    float* __restrict__ v,       // [n]
    double kept, double rate, double root, double eps, double beta1, double new1, double beta2, double new2) {
    // One thread owns WIDTH consecutive elements, or the last ones, which may be fewer.
    using C = Compute<T>;
    const C keep = C(kept), by = C(rate), times = C(root), add = C(eps);
    const C left1 = C(beta1), right1 = C(new1), left2 = C(beta2), right2 = C(new2);
    const auto update = [&](C& p, C g, float& mean, float& square) {
        // With fma: the compiler fuses one product or the other, in each of the two places that update is inlined.
        const C first = fma(left1, C(mean), right1 * g), second = fma(left2, C(square), right2 * (g * g));
        p = fma(keep, p, -by * (ratio(first, fma(root_of(second), times, add))));
        mean = float(first);
        square = float(second);
    };
    const long long at = (blockIdx.x * (long long)BLOCK_THREADS + threadIdx.x) * WIDTH;
    if (at + WIDTH <= n) {
        auto params = Vector<T, WIDTH>::load(param + at);
        const auto grads = Vector<T, WIDTH>::load(grad + at);
        auto means = Vector<float, WIDTH>::load(m + at), squares = Vector<float, WIDTH>::load(v + at);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            C p = C(params.at[j]);
            update(p, C(grads.at[j]), means.at[j], squares.at[j]);
            params.at[j] = T(p);
        }
        params.store(param + at);
        means.store(m + at);
        squares.store(v + at);
    } else {
        for (long long odd = at; odd < n; odd++) {
            C p = C(param[odd]);
            update(p, C(grad[odd]), m[odd], v[odd]);
            param[odd] = T(p);
        }
    }
}
