// The activations of matmul in CUDA C++, by their numbers in impls/matmul/operators.py.
#pragma once

enum Activation : long long { NONE, RELU, LEAKY_RELU };

// NaN stays NaN.
template <class C> __device__ inline C activate(C product, long long activation, C negative_slope) {
    if (activation == RELU) return product <= C(0) ? C(0) : product;
    if (activation == LEAKY_RELU) return product > C(0) ? product : product * negative_slope;
    return product;
}

// The gradient of the product, by the sign of the output, which is that of the product.
template <class C> __device__ inline C activation_backward(C grad, C output, long long activation, C negative_slope) {
    if (activation == RELU) return output <= C(0) ? C(0) : grad;
    return output > C(0) ? grad : grad * negative_slope;
}
