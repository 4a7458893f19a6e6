// The activations of matmul in CUDA C++, by the numbers that impls/matmul/operators.py gives them.
#pragma once

enum Activation : long long { NONE, RELU, LEAKY_RELU };

// NaN stays NaN.
template <class C> __device__ inline C activate(C product, long long activation, C negative_slope) {
    if (activation == RELU) return product <= C(0) ? C(0) : product;
    if (activation == LEAKY_RELU) return product > C(0) ? product : product * negative_slope;
    return product;
}

// The gradient of the product, by the sign of the output, which is the product's.
template <class C> __device__ inline C activation_backward(C grad, C output, long long activation, C negative_slope) {
    if (activation == RELU) return output <= C(0) ? C(0) : grad;
    return output > C(0) ? grad : grad * negative_slope;
}

// Row and column of a tile; `group` rows of tiles are walked column by column, so that what is read stays in the cache.
struct TileAt { int row, column; };
__device__ inline TileAt tile_at(int tile, int tiles_m, int tiles_n, int group) {
    const int first = tile / (group * tiles_n) * group, in_group = tile % (group * tiles_n);
    const int rows = tiles_m - first < group ? tiles_m - first : group;
    return {first + in_group % rows, in_group / rows};
}
