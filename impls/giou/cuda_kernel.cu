#include "giou/boxes.cuh"

template <class T, bool PACKED>
__global__ void __launch_bounds__(BLOCK) giou_forward_kernel(
    long long num_rows, int owned,
    const T* __restrict__ boxes1,  // [outer, inner, 4], strided
    const T* __restrict__ boxes2,  // [outer, inner, 4], strided
    double eps,
    T* __restrict__ giou,  // [outer * inner]
    long long inner, long long outer_stride1, long long inner_stride1, long long coordinate_stride1,
    long long outer_stride2, long long inner_stride2, long long coordinate_stride2) {
    // The parameters are in the order of their use, because a kernel waits for them in lines of 64 bytes.
    // One block owns owned * BLOCK consecutive pairs, one thread every BLOCK-th of them.
    using C = Compute<T>;
    const long long first = blockIdx.x * (long long)(owned * BLOCK) + threadIdx.x;
    const Boxes<T, PACKED> all1{boxes1, inner, outer_stride1, inner_stride1, coordinate_stride1};
    const Boxes<T, PACKED> all2{boxes2, inner, outer_stride2, inner_stride2, coordinate_stride2};
    Box<T> a[PAIRS<T>] = {}, b[PAIRS<T>] = {};
#pragma unroll
    for (int k = 0; k < PAIRS<T>; k++) {
        const long long row = first + k * BLOCK;
        if (k < owned && row < num_rows) {
            a[k] = all1[row];
            b[k] = all2[row];
        }
    }
#pragma unroll
    for (int k = 0; k < PAIRS<T>; k++) {
        const long long row = first + k * BLOCK;
        if (k < owned && row < num_rows) giou[row] = T(giou_of(converted<C>(a[k]), converted<C>(b[k]), C(eps)));
    }
}

template <class T, bool PACKED>
__global__ void __launch_bounds__(BLOCK, 3) giou_backward_kernel(
    long long num_rows, int owned,
    const T* __restrict__ grad_output,  // [outer, inner], strided
    const T* __restrict__ boxes1,       // [outer, inner, 4], strided
    const T* __restrict__ boxes2,       // [outer, inner, 4], strided
    Box<T>* __restrict__ grad_boxes1,   // [outer * inner], or null if not needed
    Box<T>* __restrict__ grad_boxes2,   // [outer * inner], or null if not needed
    long long inner, long long outer_stride, long long inner_stride, long long outer_stride1, long long inner_stride1,
    long long coordinate_stride1, long long outer_stride2, long long inner_stride2, long long coordinate_stride2,
    double eps) {
    // One block owns owned * BLOCK consecutive pairs, one thread every BLOCK-th of them.
    using C = Compute<T>;
    const long long first = blockIdx.x * (long long)(owned * BLOCK) + threadIdx.x;
    const Boxes<T, PACKED> all1{boxes1, inner, outer_stride1, inner_stride1, coordinate_stride1};
    const Boxes<T, PACKED> all2{boxes2, inner, outer_stride2, inner_stride2, coordinate_stride2};
    T grad[PAIRS<T>] = {};
    Box<T> raw1[PAIRS<T>] = {}, raw2[PAIRS<T>] = {};
#pragma unroll
    for (int k = 0; k < PAIRS<T>; k++) {
        const long long row = first + k * BLOCK;
        if (k < owned && row < num_rows) {
            grad[k] = grad_output[row_offset(row, inner, outer_stride, inner_stride)];
            raw1[k] = all1[row];
            raw2[k] = all2[row];
        }
    }
#pragma unroll
    for (int k = 0; k < PAIRS<T>; k++) {
        const long long row = first + k * BLOCK;
        if (k >= owned || row >= num_rows) break;
        const Box<C> a = converted<C>(raw1[k]), b = converted<C>(raw2[k]);
        const AreaGradients<C> gradients(C(grad[k]), a, b, C(eps));
        if (grad_boxes1) grad_boxes1[row] = converted<T>(gradients.of_box(a, b));
        if (grad_boxes2) grad_boxes2[row] = converted<T>(gradients.of_box(b, a));
    }
}
