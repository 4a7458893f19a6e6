#include "elementwise.cuh"
#include "rows.cuh"

// log(1 + power) within 1.6 ulp for a power from 0 to 1: power minus its square times a minimax polynomial. log1p has twice
// the instructions.
__device__ inline float log1p_of(float power) {
    constexpr float FACTORS[] = {-0.0032439810f, 0.019851261f, -0.056959160f, 0.10603617f, -0.15305570f,
                                 0.19675931f,    -0.24954133f, 0.33329964f,   -0.49999902f};
    float rest = 0;
#pragma unroll
    for (float factor : FACTORS) rest = fmaf(rest, power, factor);
    return fmaf(power * power, rest, power);
}
__device__ inline double log1p_of(double power) { return log1p(power); }
__device__ inline float log_of(float x) { return __logf(x); }
__device__ inline double log_of(double x) { return log(x); }

// What a loss and its slope are made of. `mistake` is (u + e (1 - u)) for e = exp(-|x|) and the share u of the target
// that the logit speaks against, or 0 where u is 0. `weight` is w q^gamma.
template <class C> struct Terms {
    C power, entropy, mistake, weight;

    __device__ Terms(C x, C t, C alpha, C gamma) {
        const C size = fabs(x), against = x >= C(0) ? C(1) - t : t;
        power = power_of_e(-size);
        mistake = against == C(0) ? C(0) : against + power * (x >= C(0) ? t : C(1) - t);
        const C logarithm = log1p_of(power);
        entropy = against * size + logarithm;
        weight = power_of_e(gamma * ((against == C(0) ? -size : log_of(mistake)) - logarithm));
        // With fma: in each place that this is inlined the compiler may fuse one product or the other.
        if (alpha >= C(0)) weight *= fma(alpha, t, (C(1) - alpha) * (C(1) - t));
    }
    __device__ C slope(C x, C t, C gamma) const {
        const C larger = ratio(C(1), C(1) + power), smaller = power * larger;
        // A mistake is at most 2. Where it is tiny, smaller is so too; enlarge both.
        const C enlarged = mistake < C(0x1p-100f) ? C(0x1p100f) : C(1);
        const C share = mistake == C(0) ? larger : ratio(smaller * enlarged, mistake * enlarged);
        const C of_entropy = fma(C(1) - t, x >= C(0) ? larger : smaller, -t * (x >= C(0) ? smaller : larger));
        return weight * (of_entropy + gamma * ((C(1) - C(2) * t) * (entropy * share)));
    }
};

template <class T, int WIDTH>
__global__ void __launch_bounds__(256, 8) sigmoid_focal_loss_forward_kernel(
    long long n, int owned,
    const T* __restrict__ logits,   // [n]
    const T* __restrict__ targets,  // [n]
    T* __restrict__ losses,         // [n], or null
    Compute<T>* __restrict__ sums,  // [blocks], or null
    double alpha, double gamma) {
    // One thread owns `owned` times WIDTH consecutive elements.
    using C = Compute<T>;
    C sum = 0;
    elementwise<WIDTH, T>({logits, targets}, {losses}, n, owned, [&](const C(&x)[2], C(&y)[1]) {
        const Terms<C> terms(x[0], x[1], C(alpha), C(gamma));
        y[0] = terms.weight * terms.entropy;
        sum += y[0];
    });
    if (!sums) return;
    sum = sum_over_row(Sums<C>{sum, 0}, 0).first;
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <class C, class T>
__global__ void __launch_bounds__(512) sigmoid_focal_loss_reduce_kernel(
    const C* __restrict__ sums,  // [count]
    T* __restrict__ output,      // a scalar
    long long count, long long divisor) {
    // One block owns all sums, one thread every blockDim.x-th of them.
    C sum = 0;
    for (long long at = threadIdx.x; at < count; at += blockDim.x) sum += sums[at];
    sum = sum_over_row(Sums<C>{sum, 0}, 0).first;
    if (threadIdx.x == 0) *output = T(sum / C(divisor));
}

template <class T, int WIDTH>
__global__ void sigmoid_focal_loss_backward_kernel(
    long long n, int owned, bool each,
    const T* __restrict__ logits,       // [n]
    const T* __restrict__ targets,      // [n]
    const T* __restrict__ grad_output,  // [n], or a scalar
    T* __restrict__ grad_logits,        // [n]
    double alpha, double gamma, long long divisor) {
    // One thread owns `owned` times WIDTH consecutive elements.
    using C = Compute<T>;
    const C power = C(gamma), all = each ? C(0) : C(*grad_output) / C(divisor);
    auto gradient = [&](C grad, C x, C t) { return grad * Terms<C>(x, t, C(alpha), power).slope(x, t, power); };
    if (each)
        elementwise<WIDTH, T>({grad_output, logits, targets}, {grad_logits}, n, owned,
                              [&](const C(&x)[3], C(&y)[1]) { y[0] = gradient(x[0], x[1], x[2]); });
    else
        elementwise<WIDTH, T>({logits, targets}, {grad_logits}, n, owned,
                              [&](const C(&x)[2], C(&y)[1]) { y[0] = gradient(all, x[0], x[1]); });
}
