"""Distance and complete intersection over union of paired boxes: the reference of what the losses take the mean of."""

from typing import Any

import numpy as np

from . import giou

Array = Any
# v is this times a squared difference of angles, so that it is at most 1 for upright boxes.
PER_ANGLE = 4 / np.pi**2


def distance(boxes1: Array, boxes2: Array, areas: tuple[Array, ...], eps: float) -> tuple[Array, ...]:
    """Return the centres' distances along x and y, and the hull's squared diagonal, clamped and unclamped."""
    # One sum: of boxes around 0 the differences of the corners are rounded more than the centres, and are as right.
    apart = np.sum(np.stack([boxes1[..., :2], boxes1[..., 2:], -boxes2[..., :2], -boxes2[..., 2:]]), axis=0) / 2
    *_, hull_width, hull_height, _ = areas
    raw = hull_width * hull_width + hull_height * hull_height
    return apart[..., 0], apart[..., 1], np.maximum(raw, eps), raw


def sides(boxes: Array, eps: float) -> tuple[Array, Array, Array]:
    """Return width, height, and the height clamped at eps, so that a box of height 0 has an aspect as well."""
    height = boxes[..., 3] - boxes[..., 1]
    return boxes[..., 2] - boxes[..., 0], np.maximum(height, eps), height


def aspects(boxes1: Array, boxes2: Array, iou: Array, eps: float) -> tuple[Array, Array, Array]:
    """Return the difference of the angles atan(width / height), v, and its weight alpha."""
    (width1, height1, _), (width2, height2, _) = sides(boxes1, eps), sides(boxes2, eps)
    angle = np.arctan(width1 / height1) - np.arctan(width2 / height2)
    v = PER_ANGLE * (angle * angle)
    return angle, v, v / np.maximum(1.0 - iou + v, eps)


def score(boxes1: Array, boxes2: Array, eps: float, aspect: bool = False, alpha: Array | None = None) -> Array:
    """Return DIoU = I / U - d^2 / c^2, with d the centres' distance and c the enclosing box's diagonal.

    CIoU, if `aspect`, is DIoU - alpha v, with v = 4 / pi^2 (atan(w1 / h1) - atan(w2 / h2))^2 and
    alpha = v / (1 - I / U + v).

    Args:
        boxes1: ``[..., 4]`` as ``(x1, y1, x2, y2)``.
        boxes2: the same shape.
        eps: least value of U, of c^2, of h1 and h2, and of 1 - I / U + v.
        aspect: whether the sides' ratio counts.
        alpha: in place of the boxes' own.

    Returns:
        ``[...]``, dimensionless.

    Source: Zheng et al., Distance-IoU Loss, AAAI 2020 (arXiv 1911.08287).
    """
    areas = giou.intersection_union_hull(boxes1, boxes2)
    iou = areas[2] / np.maximum(areas[3], eps)
    x, y, diagonal, _ = distance(boxes1, boxes2, areas, eps)
    result = iou - (x * x + y * y) / diagonal
    if not aspect:
        return result
    _, v, own = aspects(boxes1, boxes2, iou, eps)
    return result - (own if alpha is None else alpha) * v


def gradients(
    grad_output: Array, boxes1: Array, boxes2: Array, eps: float, aspect: bool = False
) -> tuple[Array, Array]:
    """Return gradients of ``sum(grad_output * score(...))`` for both boxes of each pair, alpha as a constant."""
    areas = giou.intersection_union_hull(boxes1, boxes2)
    *_, hull_width, hull_height, _ = areas
    x, y, diagonal, raw = distance(boxes1, boxes2, areas, eps)
    by_distance = -grad_output / diagonal
    by_diagonal = giou.through_clamp(grad_output * ((x * x + y * y) / diagonal) / diagonal, raw, eps)
    of_iou = giou.gradients_of_areas(grad_output, areas, eps, enclosed=False)[:3]
    of_areas = *of_iou, by_diagonal * (2 * hull_width), by_diagonal * (2 * hull_height)
    by_angle = np.zeros_like(by_distance)
    if aspect:
        angle, _, alpha = aspects(boxes1, boxes2, areas[2] / np.maximum(areas[3], eps), eps)
        by_angle = -grad_output * alpha * (2 * PER_ANGLE * angle)

    def box_gradient(box: Array, other: Array, sign: int) -> Array:
        # Each coordinate moves the centre by half as much.
        by_centre = np.stack([by_distance * x, by_distance * y] * 2, axis=-1) * sign
        gradient = giou.box_gradient(box, other, *of_areas) + by_centre
        if not aspect:
            return gradient
        width, height, raw_height = sides(box, eps)
        square = width * width + height * height
        by_width = by_angle * sign * (height / square)
        by_height = giou.through_clamp(-by_angle * sign * (width / square), raw_height, eps)
        return gradient + np.stack([-by_width, -by_height, by_width, by_height], axis=-1)

    return box_gradient(boxes1, boxes2, 1), box_gradient(boxes2, boxes1, -1)
