#include "elementwise.cuh"

// sigmoid(x), and sigmoid(-x) as `rest`, each to all its digits.
template <class C> __device__ C sigmoid(C x, C& rest) {
    const C power = power_of_e(-fabs(x)), larger = C(1) / (C(1) + power);
    rest = x < C(0) ? larger : power * larger;
    return x < C(0) ? power * larger : larger;
}

template <class T, int WIDTH>
__global__ void swiglu_forward_kernel(
    const T* __restrict__ gate,  // [n]
    const T* __restrict__ up,    // [n]
    T* __restrict__ output,      // [n]
    long long n) {
    using C = Compute<T>;
    elementwise<WIDTH, T>({gate, up}, {output}, n, [](const C(&x)[2], C(&y)[1]) {
        C rest;
        y[0] = x[0] * sigmoid(x[0], rest) * x[1];
    });
}

template <class T, int WIDTH>
__global__ void swiglu_backward_kernel(
    const T* __restrict__ grad_output,  // [n]
    const T* __restrict__ gate,         // [n]
    const T* __restrict__ up,           // [n]
    T* __restrict__ grad_gate,          // [n], not written unless needed
    T* __restrict__ grad_up,            // [n]
    long long n, bool needs_gate, bool needs_up) {
    using C = Compute<T>;
    T* const wanted[] = {needs_gate ? grad_gate : nullptr, needs_up ? grad_up : nullptr};
    elementwise<WIDTH, T>({grad_output, gate, up}, wanted, n, [](const C(&x)[3], C(&y)[2]) {
        C rest;
        const C share = sigmoid(x[1], rest);
        y[0] = x[0] * (x[2] * (share * (C(1) + x[1] * rest)));
        y[1] = x[0] * (x[1] * share);
    });
}
