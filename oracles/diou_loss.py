"""Mean DIoU loss over the valid rows of a padded batch: the reference."""

from typing import Any

from . import diou, giou_loss

Array = Any


def forward(pred: Array, target: Array, eps: float = 1e-5) -> Array:
    """Return the mean of ``1 - DIoU`` over the rows where ``target[..., 3] > 0``; 0 if none: see `diou.score`.

    Args:
        pred: ``[batch, max_boxes, 4]``.
        target: the same shape. Rows whose y2 is not positive are padding.
        eps: least divisor.

    Returns:
        A scalar.
    """
    return giou_loss.mean(diou.score, pred, target, eps, False)


def backward(grad_output: Array, pred: Array, target: Array, eps: float = 1e-5) -> tuple[Array, Array]:
    """Return gradients of ``grad_output * forward(pred, target, eps)``; exactly 0 in padding rows."""
    return giou_loss.gradients(diou.gradients, grad_output, pred, target, eps, False)
