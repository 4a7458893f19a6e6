"""Softmax over the last axis: the reference."""

from typing import Any

import numpy as np

Array = Any


def forward(x: Array) -> Array:
    """Return exp(x - m) / sum(exp(x - m)) with m the maximum of the row, which keeps every exponential within [0, 1].

    Args:
        x: ``[..., cols]``.

    Returns:
        ``[..., cols]``, from 0 to 1. A row that holds NaN or +inf, or only -inf, is NaN throughout.

    Source: P. Blanchard, D. J. Higham and N. J. Higham, Accurately computing the log-sum-exp and softmax functions,
    IMA Journal of Numerical Analysis 41, 2021.
    """
    terms = np.exp(x - np.max(x, axis=-1, keepdims=True, initial=-np.inf))
    return terms / np.sum(terms, axis=-1, keepdims=True)


def backward(grad_output: Array, output: Array) -> tuple[Array]:
    """Return the gradient of ``sum(grad_output * forward(x))`` from the output: y (g - sum(g y)) along each row."""
    return (output * (grad_output - np.sum(grad_output * output, axis=-1, keepdims=True)),)
