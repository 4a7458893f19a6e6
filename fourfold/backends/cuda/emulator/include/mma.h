// nvcuda::wmma on the CPU. Each lane holds rows * cols / 32 elements of a fragment, in an unspecified order as on a
// GPU.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32;
}

template <class Use, int M, int N, int K> struct extent;
template <int M, int N, int K> struct extent<matrix_a, M, N, K> { static constexpr int rows = M, cols = K; };
template <int M, int N, int K> struct extent<matrix_b, M, N, K> { static constexpr int rows = K, cols = N; };
template <int M, int N, int K> struct extent<accumulator, M, N, K> { static constexpr int rows = M, cols = N; };

template <class T> struct storage { using type = T; };
template <> struct storage<precision::tf32> { using type = float; };

template <class Use, int M, int N, int K, class T, class Layout = void> struct fragment : extent<Use, M, N, K> {
    using element_type = typename storage<T>::type;
    static constexpr int num_elements = fragment::rows * fragment::cols / 32;
    static constexpr int num_storage_elements = num_elements;
    element_type x[num_elements];
};

// Round to nearest with 10 bits of mantissa.
inline float __float_to_tf32(float v) {
    if (!std::isfinite(v)) return v;
    unsigned bits = __float_as_uint(v);
    return __uint_as_float((bits + 0x1000u) & 0xffffe000u);
}

template <class F> void fill_fragment(F& f, typename F::element_type v) {
    for (auto& e : f.x) e = v;
}

// Element i of this lane is element lane * num_elements + i of the matrix in row-major order.
template <class F, class T> FOURFOLD_INLINE void load_elements(F& f, const T* p, unsigned stride, bool by_columns) {
    for (int i = 0; i < F::num_elements; i++) {
        int at = int(::fourfold::here.lane) * F::num_elements + i, row = at / F::cols, col = at % F::cols;
        f.x[i] = by_columns ? p[col * stride + row] : p[row * stride + col];
    }
}
template <class Use, int M, int N, int K, class T, class Layout>
FOURFOLD_INLINE void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& f, const typename storage<T>::type* p, unsigned stride, FOURFOLD_SITE) {
    __syncwarp(~0u, site);
    load_elements(f, p, stride, std::is_same_v<Layout, col_major>);
}
template <int M, int N, int K, class T>
FOURFOLD_INLINE void load_matrix_sync(fragment<accumulator, M, N, K, T>& f, const T* p, unsigned stride, layout_t layout, FOURFOLD_SITE) {
    __syncwarp(~0u, site);
    load_elements(f, p, stride, layout == mem_col_major);
}
template <int M, int N, int K, class T>
FOURFOLD_INLINE void store_matrix_sync(T* p, const fragment<accumulator, M, N, K, T>& f, unsigned stride, layout_t layout, FOURFOLD_SITE) {
    for (int i = 0; i < f.num_elements; i++) {
        int at = int(::fourfold::here.lane) * f.num_elements + i, row = at / f.cols, col = at % f.cols;
        (layout == mem_col_major ? p[col * stride + row] : p[row * stride + col]) = f.x[i];
    }
    __syncwarp(~0u, site);
}

template <class D, class A, class B, class C> struct Operands {
    D* d;
    const A* a;
    const B* b;
    const C* c;
};
// The last lane to arrive computes for all lanes, in the accumulator's type, or in float for a half accumulator. Fragments
// are registers, whose accesses need no check.
template <int M, int N, int K, class D, class A, class B, class C> FOURFOLD_UNCHECKED __attribute__((optimize("O3"))) void multiply(void** slots, unsigned) {
    using Slot = Operands<D, A, B, C>;
    using Out = typename D::element_type;
    using Sum = std::conditional_t<std::is_same_v<Out, double>, double, std::conditional_t<std::is_integral_v<Out>, long long, float>>;
    Sum a[M * K], b[K * N], sums[M * N];
    for (int lane = 0; lane < 32; lane++) {
        const Slot& of = *static_cast<Slot*>(slots[lane]);
        for (int i = 0; i < A::num_elements; i++) a[lane * A::num_elements + i] = Sum(of.a->x[i]);
        for (int i = 0; i < B::num_elements; i++) b[lane * B::num_elements + i] = Sum(of.b->x[i]);
        for (int i = 0; i < C::num_elements; i++) sums[lane * C::num_elements + i] = Sum(of.c->x[i]);
    }
    for (int row = 0; row < M; row++)
        for (int k = 0; k < K; k++)
            for (int column = 0; column < N; column++) sums[row * N + column] += a[row * K + k] * b[k * N + column];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < D::num_elements; i++) static_cast<Slot*>(slots[lane])->d->x[i] = Out(sums[lane * D::num_elements + i]);
}
template <int M, int N, int K, class TD, class T, class LA, class LB, class TC>
void mma_sync(fragment<accumulator, M, N, K, TD>& d, const fragment<matrix_a, M, N, K, T, LA>& a, const fragment<matrix_b, M, N, K, T, LB>& b,
              const fragment<accumulator, M, N, K, TC>& c, FOURFOLD_SITE) {
    using D = fragment<accumulator, M, N, K, TD>;
    using A = fragment<matrix_a, M, N, K, T, LA>;
    using B = fragment<matrix_b, M, N, K, T, LB>;
    using C = fragment<accumulator, M, N, K, TC>;
    Operands<D, A, B, C> mine{&d, &a, &b, &c};
    ::fourfold::exchange(~0u, &mine, multiply<M, N, K, D, A, B, C>, site);
}

}  // namespace nvcuda::wmma
