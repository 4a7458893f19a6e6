"""Layer normalization over the last axis: the reference.

The variance is the mean of the squared deviations from the mean. On arrays that carry a running error, the error of
the mean enters it to first order, though it nearly cancels in that sum. The resulting bound admits the error of
Welford's and of pairwise updates: a multiple of roundoff times the condition number ``|mean| / deviation``. It rejects
the mean of the squares minus the square of the mean, whose error is roundoff times the square of that number.

Source: Chan, Golub, LeVeque, Algorithms for Computing the Sample Variance, The American Statistician 1983.
"""

from typing import Any

import numpy as np

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def mean(array: Array) -> Array:
    """Return the mean over the last axis, which is kept with size 1."""
    return np.sum(array, axis=-1, keepdims=True) / max(array.shape[-1], 1)


def normalize(x: Array, eps: float) -> tuple[Array, Array]:
    """Return ``(x - mean) / deviation``, and the deviation ``sqrt(variance + eps)``, ``[..., 1]``."""
    centred = x - mean(x)
    # A sum of squares is never below 0, in any arithmetic. The maximum changes no value; it tells the running error.
    deviation = np.sqrt(np.maximum(mean(centred * centred) + eps, eps))
    return centred / deviation, deviation


def forward(x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> Array:
    """Return ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Args:
        x: ``[..., cols]``, float64 or wider.
        weight: ``[cols]``.
        bias: ``[cols]``.
        eps: added to the variance.

    Returns:
        ``[..., cols]``.

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016.
    """
    return normalize(x, eps)[0] * weight + bias


def backward(grad_output: Array, x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> tuple[Array, Array, Array]:
    """Return gradients of ``sum(grad_output * forward(x, weight, bias, eps))``.

    Args:
        grad_output: ``[..., cols]``.
        x: ``[..., cols]``.
        weight: ``[cols]``.
        bias: ``[cols]``.
        eps: as in `forward`.

    Returns:
        The gradients of x, weight and bias. Those of weight and bias are sums over all rows, and 0 without rows.
    """
    normal, deviation = normalize(x, eps)
    grad_normal = grad_output * weight
    grad_x = (grad_normal - mean(grad_normal) - normal * mean(grad_normal * normal)) / deviation
    rows = tuple(range(x.ndim - 1))
    return grad_x, np.sum(grad_output * normal, axis=rows), np.sum(grad_output, axis=rows)
