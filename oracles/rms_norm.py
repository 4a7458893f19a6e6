"""Root mean square normalization over the last axis: the reference."""

from typing import Any

import numpy as np

from .layer_norm import mean

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def normalize(x: Array, eps: float) -> tuple[Array, Array]:
    """Return ``x / root``, and the root ``sqrt(mean(x^2) + eps)``, ``[..., 1]``."""
    root = np.sqrt(mean(x * x) + eps)
    return x / root, root


def forward(x: Array, weight: Array, eps: float = 1e-6) -> Array:
    """Return ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: ``[..., cols]``, float64 or wider.
        weight: ``[cols]``.
        eps: added to the mean square.

    Returns:
        ``[..., cols]``.

    Source: Zhang, Sennrich, Root Mean Square Layer Normalization, NeurIPS 2019.
    """
    return normalize(x, eps)[0] * weight


def backward(grad_output: Array, x: Array, weight: Array, eps: float = 1e-6) -> tuple[Array, Array]:
    """Return gradients of ``sum(grad_output * forward(x, weight, eps))``.

    Args:
        grad_output: ``[..., cols]``.
        x: ``[..., cols]``.
        weight: ``[cols]``.
        eps: as in `forward`.

    Returns:
        The gradients of x and weight. That of weight is a sum over all rows, and 0 without rows.
    """
    normal, root = normalize(x, eps)
    grad_normal = grad_output * weight
    grad_x = (grad_normal - normal * mean(grad_normal * normal)) / root
    return grad_x, np.sum(grad_output * normal, axis=tuple(range(x.ndim - 1)))
