"""The arithmetic of paired boxes in Triton, which the kernels of the GIoU family share."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# Pairs of a program of four warps: in forward a thread has two of them, in backward one.
FORWARD_ROWS, BACKWARD_ROWS = 256, 128


@triton.jit
def maximum(a, b):
    """Return the maximum, or NaN if either operand is NaN, as torch.maximum."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    """Return the minimum, or NaN if either operand is NaN, as torch.minimum."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_boxes(ptr, rows, offsets, coordinate_stride, mask, COMPUTE: tl.constexpr, PACKED: tl.constexpr):
    """Load x1, y1, x2, y2 of the boxes at element `offsets` or, if PACKED, of boxes `rows` of a contiguous tensor.

    A packed box is one 16-byte load per thread (8 bytes for half types, two loads for float64), split in registers.
    """
    if PACKED:
        tile = tl.load(ptr + rows.to(tl.int64)[:, None] * 4 + tl.arange(0, 4)[None, :], mask=mask[:, None], other=0.0)
        x, y = tl.split(tl.reshape(tile.to(COMPUTE), (rows.shape[0], 2, 2)))
        x1, x2 = tl.split(x)
        y1, y2 = tl.split(y)
    else:
        x1 = tl.load(ptr + offsets, mask=mask, other=0.0).to(COMPUTE)
        # Add the stride repeatedly: three times a 32-bit stride may not fit in 32 bits.
        y1 = tl.load(ptr + offsets + coordinate_stride, mask=mask, other=0.0).to(COMPUTE)
        x2 = tl.load(ptr + offsets + coordinate_stride + coordinate_stride, mask=mask, other=0.0).to(COMPUTE)
        y2 = tl.load(ptr + offsets + coordinate_stride + coordinate_stride + coordinate_stride, mask=mask, other=0.0)
        y2 = y2.to(COMPUTE)
    return x1, y1, x2, y2


@triton.jit
def store_boxes(ptr, rows, x1, y1, x2, y2, mask):
    """Store boxes number `rows` of a contiguous tensor, the inverse of a packed `load_boxes`."""
    tile = tl.reshape(tl.join(tl.join(x1, x2), tl.join(y1, y2)), (rows.shape[0], 4))
    at = ptr + rows.to(tl.int64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(at, tile.to(ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def intersection_union_hull(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2):
    """Return the sides and areas before any clamp, named as in the oracle."""
    width = minimum(ax2, bx2) - maximum(ax1, bx1)
    height = minimum(ay2, by2) - maximum(ay1, by1)
    intersection = maximum(width, 0.0) * maximum(height, 0.0)
    union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - intersection
    hull_width = maximum(ax2, bx2) - minimum(ax1, bx1)
    hull_height = maximum(ay2, by2) - minimum(ay1, by1)
    return width, height, intersection, union, hull_width, hull_height


@triton.jit
def giou_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, ENCLOSED: tl.constexpr = True):
    """Return the GIoU of each pair, or I / U alone unless ENCLOSED."""
    _, _, intersection, union, hull_width, hull_height = intersection_union_hull(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2)
    union = maximum(union, eps)
    hull = maximum(hull_width * hull_height, eps)
    score = intersection / union
    if ENCLOSED:
        score -= (hull - union) / hull
    return score


@triton.jit
def through_maximum(grad, a, b):
    """Return the share of `a` in the gradient of maximum(a, b): all, none, half at a tie; all if one is NaN."""
    return tl.where(a == b, 0.5 * grad, tl.where(a < b, 0.0, grad))


@triton.jit
def through_minimum(grad, a, b):
    """Return the share of `a` in the gradient of minimum(a, b)."""
    return tl.where(a == b, 0.5 * grad, tl.where(a > b, 0.0, grad))


@triton.jit
def grad_of_box(
    x1, y1, x2, y2, ox1, oy1, ox2, oy2, grad_union, grad_width, grad_height, grad_hull_width, grad_hull_height
):
    """Return the gradient of one box (x1, y1, x2, y2) of a pair. (ox1, oy1, ox2, oy2) is the other box."""
    by_width = grad_union * (y2 - y1)
    by_height = grad_union * (x2 - x1)
    gx1 = -by_width - through_maximum(grad_width, x1, ox1) - through_minimum(grad_hull_width, x1, ox1)
    gy1 = -by_height - through_maximum(grad_height, y1, oy1) - through_minimum(grad_hull_height, y1, oy1)
    gx2 = by_width + through_minimum(grad_width, x2, ox2) + through_maximum(grad_hull_width, x2, ox2)
    gy2 = by_height + through_minimum(grad_height, y2, oy2) + through_maximum(grad_hull_height, y2, oy2)
    return gx1, gy1, gx2, gy2


@triton.jit
def grad_of_areas(grad, ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, ENCLOSED: tl.constexpr = True):
    """Return the gradients of union, intersection sides and hull sides. Clamps pass them at the bound.

    Unless ENCLOSED, the score is I / U alone.
    """
    width, height, intersection, raw_union, hull_width, hull_height = intersection_union_hull(
        ax1, ay1, ax2, ay2, bx1, by1, bx2, by2
    )
    raw_hull = hull_width * hull_height
    union = maximum(raw_union, eps)
    hull = maximum(raw_hull, eps)
    grad_intersection = grad / union
    over_hull = grad / hull
    if not ENCLOSED:
        over_hull = tl.zeros_like(grad)
    # Do not use grad_intersection here: for boxes that lie apart it may overflow although its factor is 0.
    grad_union = tl.where(raw_union >= eps, over_hull - grad * (intersection / union) / union, 0.0)
    grad_hull = tl.where(raw_hull >= eps, over_hull * ((hull - union) / hull) - over_hull, 0.0)
    grad_intersection -= grad_union
    grad_width = tl.where(width >= 0.0, grad_intersection * maximum(height, 0.0), 0.0)
    grad_height = tl.where(height >= 0.0, grad_intersection * maximum(width, 0.0), 0.0)
    grad_hull_width, grad_hull_height = grad_hull * hull_height, grad_hull * hull_width
    if not ENCLOSED:
        grad_hull_width, grad_hull_height = tl.zeros_like(grad), tl.zeros_like(grad)
    return grad_union, grad_width, grad_height, grad_hull_width, grad_hull_height


@triton.jit
def centres_apart(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2):
    """Return the vector from the second box's centre to the first's. Differences of corners keep the most digits."""
    return 0.5 * ((ax1 - bx1) + (ax2 - bx2)), 0.5 * ((ay1 - by1) + (ay2 - by2))


@triton.jit
def angle_of(x1, y1, x2, y2, eps):
    """Return atan(width / height), with the height clamped."""
    return libdevice.atan((x2 - x1) / maximum(y2 - y1, eps))


@triton.jit
def weight_of(angle, iou, eps):
    """Return v and alpha, for a difference of angles."""
    v = angle * angle * 0.4052847345693511  # 4 / pi^2
    return v, v / maximum(1.0 - iou + v, eps)


@triton.jit
def score_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, MEASURE: tl.constexpr):
    """Return the score of each pair by a measure: "giou", "diou" or "ciou"."""
    score = giou_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, MEASURE == "giou")
    if MEASURE != "giou":
        iou = score
        _, _, _, _, hull_width, hull_height = intersection_union_hull(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2)
        x, y = centres_apart(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2)
        score = iou - (x * x + y * y) / maximum(hull_width * hull_width + hull_height * hull_height, eps)
        if MEASURE == "ciou":
            angle = angle_of(ax1, ay1, ax2, ay2, eps) - angle_of(bx1, by1, bx2, by2, eps)
            v, alpha = weight_of(angle, iou, eps)
            score -= alpha * v
    return score


@triton.jit
def grad_of_pair(grad, ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, MEASURE: tl.constexpr):
    """Return, for `grad_of`, the gradients of the areas, the centres' distance and the angle of each pair."""
    union, width, height, hull_width, hull_height = grad_of_areas(
        grad, ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, MEASURE == "giou"
    )
    distance, turn = tl.zeros_like(grad), tl.zeros_like(grad)
    if MEASURE != "giou":
        _, _, _, _, side, other_side = intersection_union_hull(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2)
        x, y = centres_apart(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2)
        raw_diagonal = side * side + other_side * other_side
        diagonal = maximum(raw_diagonal, eps)
        of_diagonal = tl.where(raw_diagonal >= eps, grad * ((x * x + y * y) / diagonal) / diagonal, 0.0)
        hull_width, hull_height = of_diagonal * (2.0 * side), of_diagonal * (2.0 * other_side)
        distance = -grad / diagonal
    if MEASURE == "ciou":
        angle = angle_of(ax1, ay1, ax2, ay2, eps) - angle_of(bx1, by1, bx2, by2, eps)
        _, alpha = weight_of(angle, giou_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, False), eps)
        turn = -grad * alpha * (angle * 0.8105694691387022)  # 8 / pi^2
    return union, width, height, hull_width, hull_height, distance, turn


@triton.jit
def grad_of(x1, y1, x2, y2, ox1, oy1, ox2, oy2, eps, of_pair, MEASURE: tl.constexpr, FIRST: tl.constexpr):
    """Return the gradient of one box (x1, y1, x2, y2) of each pair: the FIRST of `grad_of_pair` or the second."""
    union, width, height, hull_width, hull_height, distance, turn = of_pair
    gx1, gy1, gx2, gy2 = grad_of_box(x1, y1, x2, y2, ox1, oy1, ox2, oy2, union, width, height, hull_width, hull_height)
    if MEASURE != "giou":
        x, y = centres_apart(x1, y1, x2, y2, ox1, oy1, ox2, oy2)
        x, y = distance * x, distance * y
        gx1, gy1, gx2, gy2 = gx1 + x, gy1 + y, gx2 + x, gy2 + y
    if MEASURE == "ciou":
        box_width, raw_height = x2 - x1, y2 - y1
        box_height = maximum(raw_height, eps)
        square = box_width * box_width + box_height * box_height
        turn = turn if FIRST else -turn
        by_width = turn * (box_height / square)
        by_height = tl.where(raw_height >= eps, -turn * (box_width / square), 0.0)
        gx1, gy1, gx2, gy2 = gx1 - by_width, gy1 - by_height, gx2 + by_width, gy2 + by_height
    return gx1, gy1, gx2, gy2


def packed(boxes: torch.Tensor) -> bool:
    """Return whether boxes are contiguous, so that a box is one vector load."""
    return boxes.is_contiguous()
