"""Mean GIoU loss over a ragged batch, in which all target boxes are concatenated: the reference."""

from collections.abc import Callable
from typing import Any

import numpy as np

from . import giou

Array = Any


def rows_of(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each target box, the sample that it belongs to and its place in that sample."""
    counts = np.diff(offsets)
    sample = np.repeat(np.arange(len(counts)), counts)
    return sample, np.arange(len(sample)) - np.asarray(offsets)[sample]


def forward(pred: Array, target: Array, offsets: np.ndarray, eps: float = 1e-5) -> Array:
    """Return the mean of ``1 - giou(pred[i, j], target[offsets[i] + j])`` over every target box; 0 where there is none.

    Args:
        pred: ``[batch, max_boxes, 4]``.
        target: ``[total, 4]``, the boxes of one sample after another. All of them count, whatever their y2.
        offsets: ``[batch + 1]`` nondecreasing integers from 0 to total, with steps of at most max_boxes.
        eps: least area of union and hull.

    Returns:
        A scalar.
    """
    return mean(giou.score, pred, target, offsets, eps)


def backward(
    grad_output: Array, pred: Array, target: Array, offsets: np.ndarray, eps: float = 1e-5
) -> tuple[Array, Array]:
    """Return gradients of ``grad_output * forward(...)``; 0 for the boxes of pred without a target."""
    return gradients(giou.gradients, grad_output, pred, target, offsets, eps)


def mean(score: Callable[..., Array], pred: Array, target: Array, offsets: np.ndarray, *how: Any) -> Array:
    """Return the mean of ``1 - score(pred[i, j], target[offsets[i] + j], *how)`` over every target box."""
    sample, place = rows_of(offsets)
    rows = 1.0 - score(pred[sample, place], target, *how)
    return np.sum(rows) / max(len(sample), 1)


def gradients(
    of_pairs: Callable[..., tuple[Array, Array]],
    grad_output: Array,
    pred: Array,
    target: Array,
    offsets: np.ndarray,
    *how: Any,
) -> tuple[Array, Array]:
    """Return the gradients of `mean`, from those of a score's pairs."""
    sample, place = rows_of(offsets)
    row = np.broadcast_to(-grad_output / max(len(sample), 1), (len(sample),))
    grad_pred = np.zeros_like(pred)
    grad_pred[sample, place], grad_target = of_pairs(row, pred[sample, place], target, *how)
    return grad_pred, grad_target
