"""Mean GIoU loss over the valid rows of a padded batch: the reference."""

from collections.abc import Callable
from typing import Any

import numpy as np

from . import giou

Array = Any


def forward(pred: Array, target: Array, eps: float = 1e-5) -> Array:
    """Return the mean of ``1 - giou(pred, target)`` over the rows where ``target[..., 3] > 0``; 0 where there is none.

    Args:
        pred: ``[batch, max_boxes, 4]`` as ``(x1, y1, x2, y2)``.
        target: the same shape. Rows whose y2 is not positive (0, negative or NaN) are padding, at any place.
        eps: least area of union and hull.

    Returns:
        A scalar. The values of `pred` in padding rows have no influence, not even NaN.
    """
    return mean(giou.score, pred, target, eps)


def backward(grad_output: Array, pred: Array, target: Array, eps: float = 1e-5) -> tuple[Array, Array]:
    """Return gradients of ``grad_output * forward(pred, target, eps)``; exactly 0 in padding rows."""
    return gradients(giou.gradients, grad_output, pred, target, eps)


def mean(score: Callable[..., Array], pred: Array, target: Array, *how: Any) -> Array:
    """Return the mean of ``1 - score(pred, target, *how)`` over the valid rows."""
    valid = target[..., 3] > 0
    rows = 1.0 - score(pred[valid], target[valid], *how)
    return np.sum(rows) / max(int(np.count_nonzero(valid)), 1)


def gradients(
    of_pairs: Callable[..., tuple[Array, Array]], grad_output: Array, pred: Array, target: Array, *how: Any
) -> tuple[Array, Array]:
    """Return the gradients of `mean`, from those of a score's pairs."""
    valid = target[..., 3] > 0
    row = np.broadcast_to(-grad_output / max(int(np.count_nonzero(valid)), 1), (int(np.count_nonzero(valid)),))
    grad_pred, grad_target = np.zeros_like(pred), np.zeros_like(target)
    grad_pred[valid], grad_target[valid] = of_pairs(row, pred[valid], target[valid], *how)
    return grad_pred, grad_target
