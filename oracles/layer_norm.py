"""Layer normalization over the last axis: the reference.

The variance is the mean of the squared deviations from the mean. On arrays that carry a running error, the error of
the mean enters it to first order, though in that sum it nearly cancels. What a bound so taken admits is the error of
Welford's and of pairwise updates, a multiple of roundoff times the condition number ``|mean| / deviation``; the mean of
the squares less the square of the mean goes wrong by roundoff times the square of that number, and is not admitted.

Source: Chan, Golub, LeVeque, Algorithms for Computing the Sample Variance, The American Statistician 1983.
"""

from typing import Any

import numpy as np

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def mean(array: Array) -> Array:
    """Mean over the last axis, which stays."""
    return np.sum(array, axis=-1, keepdims=True) / max(array.shape[-1], 1)


def normalized(x: Array, eps: float) -> tuple[Array, Array]:
    """``(x - mean) / deviation`` and the deviation, ``[..., 1]``: the root of the variance and eps together."""
    centred = x - mean(x)
    # No sum of squares is below 0, in any arithmetic: the maximum changes nothing, but a running error learns of it.
    deviation = np.sqrt(np.maximum(mean(centred * centred) + eps, eps))
    return centred / deviation, deviation


def forward(x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> Array:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Args:
        x: ``[..., cols]``, float64 or wider.
        weight: ``[cols]``.
        bias: ``[cols]``.
        eps: added to the variance.

    Returns:
        ``[..., cols]``.

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016.
    """
    return normalized(x, eps)[0] * weight + bias


def backward(grad_output: Array, x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> tuple[Array, Array, Array]:
    """Gradients of ``sum(grad_output * forward(x, weight, bias, eps))``.

    Args:
        grad_output: ``[..., cols]``.
        x: ``[..., cols]``.
        weight: ``[cols]``.
        bias: ``[cols]``.
        eps: as in `forward`.

    Returns:
        The gradients of x, weight and bias. Those of weight and bias are sums over all rows, 0 where there is none.
    """
    normal, deviation = normalized(x, eps)
    grad_normal = grad_output * weight
    grad_x = (grad_normal - mean(grad_normal) - normal * mean(grad_normal * normal)) / deviation
    rows = tuple(range(x.ndim - 1))
    return grad_x, np.sum(grad_output * normal, axis=rows), np.sum(grad_output, axis=rows)
