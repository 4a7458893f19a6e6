"""Mean DIoU loss over a ragged batch: the reference."""

from typing import Any

import numpy as np

from . import diou, giou_loss_ragged

Array = Any


def forward(pred: Array, target: Array, offsets: np.ndarray, eps: float = 1e-5) -> Array:
    """Return the mean of ``1 - DIoU`` of ``pred[i, j]`` and ``target[offsets[i] + j]``; 0 if none: see `diou.score`.

    Args:
        pred: ``[batch, max_boxes, 4]``.
        target: ``[total, 4]``.
        offsets: ``[batch + 1]`` integers, as in giou_loss_ragged.
        eps: least divisor.

    Returns:
        A scalar.
    """
    return giou_loss_ragged.mean(diou.score, pred, target, offsets, eps, False)


def backward(
    grad_output: Array, pred: Array, target: Array, offsets: np.ndarray, eps: float = 1e-5
) -> tuple[Array, Array]:
    """Return gradients of ``grad_output * forward(...)``; 0 for the boxes of pred without a target."""
    return giou_loss_ragged.gradients(diou.gradients, grad_output, pred, target, offsets, eps, False)
