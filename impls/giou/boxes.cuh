// The arithmetic of paired boxes in CUDA C++, which the kernels of the GIoU family share.
#pragma once
#include "rows.cuh"

constexpr int BLOCK = 256;
// The most pairs of a thread that owns no others: enough to load at least 16 bytes of each tensor.
template <class T> constexpr int PAIRS = sizeof(T) == 2 ? 2 : 1;
// The number of rows that a looping thread loads together. More keep the memory busier, until registers run out.
template <class T> constexpr int ROWS = sizeof(T) == 8 ? 2 : 4;

// Aligned so that a box takes one memory access: 8 bytes for half types, 16 for float, two of 16 for double.
template <class T> struct __align__(sizeof(T) == 2 ? 8 : 16) Box { T x1, y1, x2, y2; };

// What holds a box until it is used: of half types one word. The compiler would split their elements before the next
// branch, and so wait there for a box that is on the way.
template <class T, int BYTES = sizeof(T)> struct HolderOf { using type = Box<T>; };
template <class T> struct HolderOf<T, 2> { using type = uint2; };
template <class T> using Holder = typename HolderOf<T>::type;

template <class To, class From> __device__ inline To same_bits(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// A tensor [outer, inner, 4]. PACKED: it is contiguous and aligned as Box is.
template <class T, bool PACKED> struct Boxes {
    const T* __restrict__ ptr;
    long long inner, outer_stride, inner_stride, coordinate_stride;

    __device__ Box<T> operator[](long long row) const { return load(offset_of(row)); }
    __device__ long long offset_of(long long row) const {
        return PACKED ? row * 4 : row_offset(row, inner, outer_stride, inner_stride);
    }
    __device__ Holder<T> hold(long long offset) const {
        if constexpr (PACKED) return *reinterpret_cast<const Holder<T>*>(ptr + offset);
        else return same_bits<Holder<T>>(load(offset));
    }
    __device__ Box<T> load(long long offset) const {
        const T* at = ptr + offset;
        if constexpr (PACKED) return *reinterpret_cast<const Box<T>*>(at);
        else return {at[0], at[coordinate_stride], at[2 * coordinate_stride], at[3 * coordinate_stride]};
    }
};

template <class C, class T> __device__ inline Box<C> converted(Box<T> box) {
    return {C(box.x1), C(box.y1), C(box.x2), C(box.y2)};
}

// As torch.maximum and torch.minimum: NaN if either operand is NaN.
template <class C> __device__ inline C maximum(C a, C b) { return a > b || a != a ? a : b; }
template <class C> __device__ inline C minimum(C a, C b) { return a < b || a != a ? a : b; }

template <class C> __device__ inline C quotient(C a, C b) { return a / b; }
#if !defined(CUDA_ON_CPU) && __CUDA_ARCH__ >= 800
// One instruction each in place of three.
__device__ inline float maximum(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ inline float minimum(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
// Within 2 ulp, as Triton divides: the correctly rounded quotient takes three times the instructions.
__device__ inline float quotient(float a, float b) {
    float c;
    asm("div.full.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
#endif

// The sides and areas before any clamp, named as in the oracle.
template <class C> struct Areas {
    C width, height, intersection, raw_union, hull_width, hull_height;

    __device__ Areas(const Box<C>& a, const Box<C>& b)
        : width(minimum(a.x2, b.x2) - maximum(a.x1, b.x1)),
          height(minimum(a.y2, b.y2) - maximum(a.y1, b.y1)),
          intersection(maximum(width, C(0)) * maximum(height, C(0))),
          raw_union((a.x2 - a.x1) * (a.y2 - a.y1) + (b.x2 - b.x1) * (b.y2 - b.y1) - intersection),
          hull_width(maximum(a.x2, b.x2) - minimum(a.x1, b.x1)),
          hull_height(maximum(a.y2, b.y2) - minimum(a.y1, b.y1)) {}
};

// Unless ENCLOSED, I / U alone.
template <bool ENCLOSED = true, class C> __device__ inline C giou_of(const Box<C>& a, const Box<C>& b, C eps) {
    Areas<C> of(a, b);
    if constexpr (!ENCLOSED) return quotient(of.intersection, maximum(of.raw_union, eps));
    C united = maximum(of.raw_union, eps), hull = maximum(of.hull_width * of.hull_height, eps);
    return quotient(of.intersection, united) - quotient(hull - united, hull);
}

// The share of `mine` in the gradient of maximum(mine, other): all, none, or half at a tie. All if one of them is NaN.
template <class C> __device__ inline C through_maximum(C grad, C mine, C other) {
    return mine == other ? C(0.5) * grad : mine < other ? C(0) : grad;
}
template <class C> __device__ inline C through_minimum(C grad, C mine, C other) {
    return mine == other ? C(0.5) * grad : mine > other ? C(0) : grad;
}

// The gradients of the union, the intersection's sides and the hull's sides of a pair. Clamps pass them at the bound.
// Unless ENCLOSED, they are of I / U alone.
template <class C, bool ENCLOSED = true> struct AreaGradients {
    C united, width, height, hull_width, hull_height;

    __device__ AreaGradients(C grad, const Box<C>& a, const Box<C>& b, C eps) {
        Areas<C> of(a, b);
        C raw_hull = of.hull_width * of.hull_height;
        C union_area = maximum(of.raw_union, eps), hull_area = maximum(raw_hull, eps);
        C over_union = quotient(grad, union_area), over_hull = quotient(grad, hull_area);
        if constexpr (!ENCLOSED) over_hull = 0;
        // Do not use over_union here: for boxes that lie apart it may overflow although its factor is 0.
        united = of.raw_union >= eps ? over_hull - quotient(grad * quotient(of.intersection, union_area), union_area) : C(0);
        C hull = raw_hull >= eps ? over_hull * quotient(hull_area - union_area, hull_area) - over_hull : C(0);
        C intersection = over_union - united;
        width = of.width >= C(0) ? intersection * maximum(of.height, C(0)) : C(0);
        height = of.height >= C(0) ? intersection * maximum(of.width, C(0)) : C(0);
        hull_width = ENCLOSED ? hull * of.hull_height : C(0);
        hull_height = ENCLOSED ? hull * of.hull_width : C(0);
    }

    // The gradient of one box of the pair.
    __device__ Box<C> of_box(const Box<C>& box, const Box<C>& other) const {
        C by_width = united * (box.y2 - box.y1), by_height = united * (box.x2 - box.x1);
        return {
            -by_width - through_maximum(width, box.x1, other.x1) - through_minimum(hull_width, box.x1, other.x1),
            -by_height - through_maximum(height, box.y1, other.y1) - through_minimum(hull_height, box.y1, other.y1),
            by_width + through_minimum(width, box.x2, other.x2) + through_maximum(hull_width, box.x2, other.x2),
            by_height + through_minimum(height, box.y2, other.y2) + through_maximum(hull_height, box.y2, other.y2),
        };
    }
};
