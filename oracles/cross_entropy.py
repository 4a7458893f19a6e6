"""Cross entropy of logits and classes: the reference."""

from typing import Any

import numpy as np

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def shift_by_maximum(logits: Array) -> Array:
    """Return each row less its maximum, which keeps every exponential within [0, 1]."""
    return logits - np.max(logits, axis=-1, keepdims=True)


def forward(
    logits: Array, target: Array, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Array:
    """Return ``-sum(q log(softmax(logits)))`` of each row, where q is the target's distribution.

    Args:
        logits: ``[rows, classes]``, at least one class.
        target: ``[rows]`` integers: a class, or `ignore_index`. A row that is ignored has loss 0.
        ignore_index: what marks such a row.
        label_smoothing: q is ``1 - label_smoothing`` at the target, plus ``label_smoothing / classes`` everywhere.
        reduction: "none" for ``[rows]`` losses, "sum" for their sum, "mean" for their mean over rows that count.

    Returns:
        ``[rows]``, or a scalar. The mean over no rows is NaN, as 0 / 0 is.

    Source: Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2015, for the smoothing.
    """
    counted = target != ignore_index
    rows = shift_by_maximum(logits[counted])
    expected = rows[np.arange(len(rows)), target[counted]]
    if label_smoothing:
        # In the arithmetic of the logits, which may be wider than a number of Python's.
        smoothing = label_smoothing * np.ones_like(expected)
        expected = (1 - smoothing) * expected + smoothing * (np.sum(rows, axis=-1) / rows.shape[-1])
    losses = np.log(np.sum(np.exp(rows), axis=-1)) - expected
    if reduction == "none":
        every = np.zeros_like(logits[:, 0])
        every[counted] = losses
        return every
    count = int(np.count_nonzero(counted))
    total = np.sum(losses)
    return total if reduction == "sum" else total / count if count else total + np.nan


def backward(
    grad_output: Array,
    logits: Array,
    target: Array,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> tuple[Array]:
    """Return the gradient of ``sum(grad_output * forward(...))`` for logits: 0 in rows that are ignored."""
    counted = target != ignore_index
    terms = np.exp(shift_by_maximum(logits[counted]))
    smoothing = label_smoothing * np.ones_like(terms[:, 0])
    slope = terms / np.sum(terms, axis=-1, keepdims=True) - smoothing[:, None] / logits.shape[-1]
    at = np.arange(len(terms)), target[counted]
    slope[at] = slope[at] - (1 - smoothing)
    of_row = grad_output[counted][:, None] if reduction == "none" else grad_output
    if reduction == "mean":
        of_row = of_row / max(int(np.count_nonzero(counted)), 1)
    grad_logits = np.zeros_like(logits)
    grad_logits[counted] = slope * of_row
    return (grad_logits,)
