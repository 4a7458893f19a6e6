// The measures of a pair of boxes that a loss is made of: GIoU, DIoU and CIoU.
#pragma once
#include "boxes.cuh"

enum Measure { GIOU, DIOU, CIOU };

// The parts of DIoU and CIoU beside intersection and union, named as in the oracle.
template <class C> struct Distance {
    C x, y, raw_diagonal, diagonal, share;

    __device__ Distance(const Box<C>& a, const Box<C>& b, const Areas<C>& of, C eps)
        // Of large coordinates, the differences of the corners keep more digits than those of the centres.
        : x(C(0.5) * ((a.x1 - b.x1) + (a.x2 - b.x2))),
          y(C(0.5) * ((a.y1 - b.y1) + (a.y2 - b.y2))),
          raw_diagonal(of.hull_width * of.hull_width + of.hull_height * of.hull_height),
          diagonal(maximum(raw_diagonal, eps)),
          share(quotient(x * x + y * y, diagonal)) {}
};

template <class C> struct Aspect {
    C angle, v, alpha;

    // The angle is atan(width / height), with the height clamped.
    __device__ static C angle_of(const Box<C>& box, C eps) {
        return atan(quotient(box.x2 - box.x1, maximum(box.y2 - box.y1, eps)));
    }
    __device__ Aspect(const Box<C>& a, const Box<C>& b, C iou, C eps)
        : angle(angle_of(a, eps) - angle_of(b, eps)),
          v(angle * angle * C(0.4052847345693511)),  // 4 / pi^2
          alpha(quotient(v, maximum(C(1) - iou + v, eps))) {}
};

template <Measure MEASURE, class C> __device__ inline C score_of(const Box<C>& a, const Box<C>& b, C eps) {
    if constexpr (MEASURE == GIOU) return giou_of(a, b, eps);
    const C iou = giou_of<false>(a, b, eps), score = iou - Distance<C>(a, b, Areas<C>(a, b), eps).share;
    if constexpr (MEASURE != CIOU) return score;
    const Aspect<C> aspect(a, b, iou, eps);
    return score - aspect.alpha * aspect.v;
}

// The gradients of a pair's score, of which those of its boxes are made.
template <class C, Measure MEASURE> struct PairGradients : AreaGradients<C, MEASURE == GIOU> {
    using Base = AreaGradients<C, MEASURE == GIOU>;
    const Box<C>&a, &b;
    C eps, distance = 0, turn = 0;

    __device__ PairGradients(C grad, const Box<C>& a, const Box<C>& b, C eps)
        : Base(grad, a, b, eps), a(a), b(b), eps(eps) {
        if constexpr (MEASURE == GIOU) return;
        const Areas<C> of(a, b);
        const Distance<C> apart(a, b, of, eps);
        distance = quotient(-grad, apart.diagonal);
        const C diagonal = apart.raw_diagonal >= eps ? quotient(grad * apart.share, apart.diagonal) : C(0);
        this->hull_width = diagonal * (C(2) * of.hull_width);
        this->hull_height = diagonal * (C(2) * of.hull_height);
        if constexpr (MEASURE != CIOU) return;
        const Aspect<C> aspect(a, b, giou_of<false>(a, b, eps), eps);
        turn = -grad * aspect.alpha * (aspect.angle * C(0.8105694691387022));  // 8 / pi^2
    }

    __device__ Box<C> of_first() const { return of_box(a, b, turn); }
    __device__ Box<C> of_second() const { return of_box(b, a, -turn); }

private:
    __device__ Box<C> of_box(const Box<C>& box, const Box<C>& other, C turn) const {
        Box<C> gradient = Base::of_box(box, other);
        if constexpr (MEASURE == GIOU) return gradient;
        const C x = distance * (C(0.5) * ((box.x1 - other.x1) + (box.x2 - other.x2)));
        const C y = distance * (C(0.5) * ((box.y1 - other.y1) + (box.y2 - other.y2)));
        gradient = {gradient.x1 + x, gradient.y1 + y, gradient.x2 + x, gradient.y2 + y};
        if constexpr (MEASURE != CIOU) return gradient;
        const C width = box.x2 - box.x1, raw_height = box.y2 - box.y1, height = maximum(raw_height, eps);
        const C square = width * width + height * height;
        const C by_width = turn * quotient(height, square);
        const C by_height = raw_height >= eps ? -turn * quotient(width, square) : C(0);
        return {gradient.x1 - by_width, gradient.y1 - by_height, gradient.x2 + by_width, gradient.y2 + by_height};
    }
};
