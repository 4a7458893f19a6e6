#include "vectors.cuh"

__device__ inline float root_of(float x) { return sqrtf(x); }
__device__ inline double root_of(double x) { return sqrt(x); }

template <class T, int WIDTH>
__global__ void adam_kernel(
    T* __restrict__ param,       // [n]
    const T* __restrict__ grad,  // [n]
    float* __restrict__ m,       // [n]
    float* __restrict__ v,       // [n]
    long long n, double kept, double rate, double root, double eps, double beta1, double new1, double beta2,
    double new2) {
    // One thread owns every (gridDim.x * blockDim.x)-th run of WIDTH elements, which is one vector of the widest type.
    // The last ones, fewer than WIDTH, have a thread each.
    using C = Compute<T>;
    constexpr int OF_PARAM = WIDTH == 1 ? 1 : 16 / sizeof(T), OF_STATES = WIDTH == 1 ? 1 : 4;
    const C keep = C(kept), by = C(rate), times = C(root), add = C(eps);
    const C left1 = C(beta1), right1 = C(new1), left2 = C(beta2), right2 = C(new2);
    const auto update = [&](C& p, C g, float& mean, float& square) {
        // With fma: the compiler fuses one product or the other, in each of the two places that update is inlined.
        const C first = fma(left1, C(mean), right1 * g), second = fma(left2, C(square), right2 * (g * g));
        p = fma(keep, p, -by * (first / fma(root_of(second), times, add)));
        mean = float(first);
        square = float(second);
    };
    const long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x, runs = n / WIDTH;
    for (long long run = thread; run < runs; run += gridDim.x * (long long)blockDim.x) {
        const long long at = run * WIDTH;
        Vector<T, OF_PARAM> params[WIDTH / OF_PARAM], grads[WIDTH / OF_PARAM];
        Vector<float, OF_STATES> means[WIDTH / OF_STATES], squares[WIDTH / OF_STATES];
#pragma unroll
        for (int k = 0; k < WIDTH / OF_PARAM; k++) {
            params[k] = Vector<T, OF_PARAM>::load(param + at + k * OF_PARAM);
            grads[k] = Vector<T, OF_PARAM>::load(grad + at + k * OF_PARAM);
        }
#pragma unroll
        for (int k = 0; k < WIDTH / OF_STATES; k++) {
            means[k] = Vector<float, OF_STATES>::load(m + at + k * OF_STATES);
            squares[k] = Vector<float, OF_STATES>::load(v + at + k * OF_STATES);
        }
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            T& stored = params[j / OF_PARAM].at[j % OF_PARAM];
            C p = C(stored);
            update(p, C(grads[j / OF_PARAM].at[j % OF_PARAM]), means[j / OF_STATES].at[j % OF_STATES],
                   squares[j / OF_STATES].at[j % OF_STATES]);
            stored = T(p);
        }
#pragma unroll
        for (int k = 0; k < WIDTH / OF_PARAM; k++) params[k].store(param + at + k * OF_PARAM);
#pragma unroll
        for (int k = 0; k < WIDTH / OF_STATES; k++) {
            means[k].store(m + at + k * OF_STATES);
            squares[k].store(v + at + k * OF_STATES);
        }
    }
    const long long odd = runs * WIDTH + thread;
    if (odd >= n) return;
    C p = C(param[odd]);
    update(p, C(grad[odd]), m[odd], v[odd]);
    param[odd] = T(p);
}
