"""Mean GIoU loss over the valid rows of a padded batch: the reference."""

from typing import Any

import numpy as np

from . import giou

Array = Any


def forward(pred: Array, target: Array, eps: float = 1e-5) -> Array:
    """Mean of ``1 - giou(pred, target)`` over the rows where ``target[..., 3] > 0``; 0 where there is none.

    Args:
        pred: ``[batch, max_boxes, 4]`` as ``(x1, y1, x2, y2)``.
        target: the same shape. Rows whose y2 is not positive (0, negative or NaN) are padding, at any place.
        eps: least area of union and hull.

    Returns:
        A scalar. The values of `pred` in padding rows have no influence, not even NaN.
    """
    valid = target[..., 3] > 0
    rows = 1.0 - giou.forward(pred[valid], target[valid], eps)
    return np.sum(rows) / max(int(np.count_nonzero(valid)), 1)


def backward(grad_output: Array, pred: Array, target: Array, eps: float = 1e-5) -> tuple[Array, Array]:
    """Gradients of ``grad_output * forward(pred, target, eps)`` for pred and target; exactly 0 in padding rows."""
    valid = target[..., 3] > 0
    row = np.broadcast_to(-grad_output / max(int(np.count_nonzero(valid)), 1), (int(np.count_nonzero(valid)),))
    grad_pred, grad_target = np.zeros_like(pred), np.zeros_like(target)
    grad_pred[valid], grad_target[valid] = giou.backward(row, pred[valid], target[valid], eps)
    return grad_pred, grad_target
