"""Generalized intersection over union of each box with each other: the reference."""

from typing import Any

import numpy as np

from . import giou

Array = Any


def forward(boxes_a: Array, boxes_b: Array, mode: str = "giou", eps: float = 1e-5) -> Array:
    """Return ``score[i, j]`` of boxes_a[i] and boxes_b[j]: their giou, or intersection over union alone.

    Args:
        boxes_a: ``[n, 4]`` as ``(x1, y1, x2, y2)``.
        boxes_b: ``[m, 4]``.
        mode: "giou" or "iou".
        eps: least area of union and hull.

    Returns:
        ``[n, m]``.
    """
    return giou.score(boxes_a[:, None], boxes_b[None], eps, mode == "giou")


def backward(
    grad_output: Array, boxes_a: Array, boxes_b: Array, mode: str = "giou", eps: float = 1e-5
) -> tuple[Array, Array]:
    """Return the gradients of ``sum(grad_output * forward(...))``: sums over a row's pairs and over a column's."""
    of_a, of_b = giou.gradients(grad_output, boxes_a[:, None], boxes_b[None], eps, mode == "giou")
    return np.sum(of_a, axis=1), np.sum(of_b, axis=0)
