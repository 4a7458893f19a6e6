"""Generalized intersection over union of paired boxes: the reference.

The code uses plain array operations. On NumPy arrays it gives the value; on arrays that carry a running error it also
gives the bound that every kernel must meet. The backward pass reverses the forward pass step by step, as automatic
differentiation does, so that ties, clamps, NaN and infinity give the same results as in torch eager.
"""

from typing import Any

import numpy as np

from .ties import tie_derivative

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def through_maximum(grad: Array, a: Array, b: Array) -> Array:
    """Return the gradient of ``maximum(a, b)`` for `a`: all of `grad`, none, half at a tie; all where one is NaN.

    As in torch, a gradient that is not passed on is 0, even where `grad` is infinite or NaN.
    """
    tie = tie_derivative(grad / 2, np.zeros_like(grad), grad)
    return np.where(a == b, tie, np.where(a < b, 0.0, grad))


def through_minimum(grad: Array, a: Array, b: Array) -> Array:
    """Return the gradient of ``minimum(a, b)`` for `a`, by the rules of `through_maximum`."""
    tie = tie_derivative(grad / 2, np.zeros_like(grad), grad)
    return np.where(a == b, tie, np.where(a > b, 0.0, grad))


def through_clamp(grad: Array, x: Array, least: Any) -> Array:
    """Return the gradient of ``maximum(x, least)`` for x: all where ``x >= least``, none below or at NaN."""
    tie = tie_derivative(grad, np.zeros_like(grad), grad)
    return np.where(x > least, grad, np.where(x == least, tie, 0.0))


def intersection_union_hull(boxes1: Array, boxes2: Array) -> tuple[Array, ...]:
    """Return the shared steps: width, height and area of the intersection and the hull, and the union.

    Negative sides of the intersection are clamped in its area only. Union and hull are not clamped to eps.
    """
    width = np.minimum(boxes1[..., 2], boxes2[..., 2]) - np.maximum(boxes1[..., 0], boxes2[..., 0])
    height = np.minimum(boxes1[..., 3], boxes2[..., 3]) - np.maximum(boxes1[..., 1], boxes2[..., 1])
    intersection = np.maximum(width, 0.0) * np.maximum(height, 0.0)
    area1 = (boxes1[..., 2] - boxes1[..., 0]) * (boxes1[..., 3] - boxes1[..., 1])
    area2 = (boxes2[..., 2] - boxes2[..., 0]) * (boxes2[..., 3] - boxes2[..., 1])
    union = area1 + area2 - intersection
    hull_width = np.maximum(boxes1[..., 2], boxes2[..., 2]) - np.minimum(boxes1[..., 0], boxes2[..., 0])
    hull_height = np.maximum(boxes1[..., 3], boxes2[..., 3]) - np.minimum(boxes1[..., 1], boxes2[..., 1])
    hull = hull_width * hull_height
    return width, height, intersection, union, hull_width, hull_height, hull


def forward(boxes1: Array, boxes2: Array, eps: float = 1e-5) -> Array:
    """Return GIoU = I / U - (C - U) / C, with I the intersection, U = max(A1 + A2 - I, eps), C = max(hull, eps).

    Args:
        boxes1: ``[..., 4]`` as ``(x1, y1, x2, y2)``, float64 or wider.
        boxes2: the same shape.
        eps: least value of union and hull, in units of area.

    Returns:
        ``[...]``, dimensionless, in [-1, 1] for boxes with x1 <= x2 and y1 <= y2.

    Source: Rezatofighi et al., Generalized Intersection over Union, CVPR 2019.
    """
    return score(boxes1, boxes2, eps)


def score(boxes1: Array, boxes2: Array, eps: float, enclosed: bool = True) -> Array:
    """Return GIoU, or I / U alone unless `enclosed`, of boxes whose leading axes are broadcast."""
    _, _, intersection, union, _, _, hull = intersection_union_hull(boxes1, boxes2)
    union = np.maximum(union, eps)
    if not enclosed:
        return intersection / union
    hull = np.maximum(hull, eps)
    return intersection / union - (hull - union) / hull


def backward(grad_output: Array, boxes1: Array, boxes2: Array, eps: float = 1e-5) -> tuple[Array, Array]:
    """Return gradients of ``sum(grad_output * forward(boxes1, boxes2, eps))``.

    Args:
        grad_output: ``[...]``.
        boxes1: ``[..., 4]``.
        boxes2: ``[..., 4]``.
        eps: as in `forward`.

    Returns:
        The gradients of boxes1 and boxes2, ``[..., 4]`` each. At a tie the documented choice is: equal coordinates
        share the gradient half and half; a clamp passes it on where its operand is at or above the bound.
    """
    return gradients(grad_output, boxes1, boxes2, eps)


def gradients(
    grad_output: Array, boxes1: Array, boxes2: Array, eps: float, enclosed: bool = True
) -> tuple[Array, Array]:
    """Return the gradients of ``sum(grad_output * score(...))`` for both boxes of each pair."""
    of_areas = gradients_of_areas(grad_output, intersection_union_hull(boxes1, boxes2), eps, enclosed)
    return box_gradient(boxes1, boxes2, *of_areas), box_gradient(boxes2, boxes1, *of_areas)


def gradients_of_areas(grad_output: Array, areas: tuple[Array, ...], eps: float, enclosed: bool) -> tuple[Array, ...]:
    """Return the gradients of the union, and of the intersection's and the hull's sides."""
    width, height, intersection, raw_union, hull_width, hull_height, raw_hull = areas
    union = np.maximum(raw_union, eps)

    grad_intersection = grad_output / union
    grad_union = -grad_times_quotient(grad_output, intersection / union, union)
    grad_hull_width = grad_hull_height = np.zeros_like(grad_union)
    if enclosed:
        hull = np.maximum(raw_hull, eps)
        penalty = (hull - union) / hull
        grad_union = grad_output / hull + grad_union
        grad_hull = through_clamp(grad_times_quotient(grad_output, penalty, hull) - grad_output / hull, raw_hull, eps)
        grad_hull_width, grad_hull_height = grad_hull * hull_height, grad_hull * hull_width
    grad_union = through_clamp(grad_union, raw_union, eps)
    grad_intersection = grad_intersection - grad_union

    grad_width = through_clamp(grad_intersection * np.maximum(height, 0.0), width, 0.0)
    grad_height = through_clamp(grad_intersection * np.maximum(width, 0.0), height, 0.0)
    return grad_union, grad_width, grad_height, grad_hull_width, grad_hull_height


def grad_times_quotient(grad: Array, quotient: Array, divisor: Array) -> Array:
    """Return ``grad * quotient / divisor``, in either order: an infinite cotangent times a quotient of 0 is NaN."""
    return np.maximum(grad * quotient / divisor, grad * (quotient / divisor))


def box_gradient(
    box: Array,
    other: Array,
    grad_union: Array,
    grad_width: Array,
    grad_height: Array,
    grad_hull_width: Array,
    grad_hull_height: Array,
) -> Array:
    """Return the gradient of one box of each pair, from those of the union and the sides."""
    box_width = box[..., 2] - box[..., 0]
    box_height = box[..., 3] - box[..., 1]
    by_width, by_height = grad_union * box_height, grad_union * box_width
    # x1 and y1 enter the intersection by a maximum and the hull by a minimum, x2 and y2 the other way round.
    x1 = -by_width - through_maximum(grad_width, box[..., 0], other[..., 0])
    x1 = x1 - through_minimum(grad_hull_width, box[..., 0], other[..., 0])
    y1 = -by_height - through_maximum(grad_height, box[..., 1], other[..., 1])
    y1 = y1 - through_minimum(grad_hull_height, box[..., 1], other[..., 1])
    x2 = by_width + through_minimum(grad_width, box[..., 2], other[..., 2])
    x2 = x2 + through_maximum(grad_hull_width, box[..., 2], other[..., 2])
    y2 = by_height + through_minimum(grad_height, box[..., 3], other[..., 3])
    y2 = y2 + through_maximum(grad_hull_height, box[..., 3], other[..., 3])
    return np.stack([x1, y1, x2, y2], axis=-1)
