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

// The row and column of a tile. The order walks `group` rows of tiles by columns, so that inputs stay in the cache.
struct TileAt { int row, column; };
__device__ inline TileAt tile_at(int tile, int tiles_m, int tiles_n, int group) {
    const int first = tile / (group * tiles_n) * group, in_group = tile % (group * tiles_n);
    const int rows = tiles_m - first < group ? tiles_m - first : group;
    return {first + in_group % rows, in_group / rows};
}
