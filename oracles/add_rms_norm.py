"""A residual that is added to x, and the root mean square normalization of the sum: the reference."""

from collections.abc import Callable
from typing import Any

from . import rms_norm

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def unchanged(array: Array) -> Array:
    """Return the array itself: an intermediate result that is not rounded."""
    return array


def forward(
    x: Array, residual: Array, weight: Array, eps: float = 1e-6, stored: Callable[[Array], Array] = unchanged
) -> tuple[Array, Array]:
    """Return ``residual_out = x + residual``, and ``y = rms_norm(residual_out)``.

    Args:
        x: ``[..., cols]``, float64 or wider.
        residual: ``[..., cols]``.
        weight: ``[cols]``.
        eps: added to the mean square.
        stored: rounds an intermediate result to the dtype of the tensors, as a kernel may the sum that it normalizes.

    Returns:
        y and residual_out, ``[..., cols]``.

    Source: `fused_add_rms_norm` of vLLM.
    """
    residual_out = x + residual
    return rms_norm.forward(stored(residual_out), weight, eps), residual_out


def backward(
    grad_y: Array,
    grad_residual_out: Array,
    x: Array,
    residual: Array,
    weight: Array,
    eps: float = 1e-6,
    stored: Callable[[Array], Array] = unchanged,
) -> tuple[Array, Array, Array]:
    """Return gradients of ``sum(grad_y * y) + sum(grad_residual_out * residual_out)``.

    Args:
        grad_y: ``[..., cols]``.
        grad_residual_out: ``[..., cols]``.
        x: ``[..., cols]``.
        residual: ``[..., cols]``.
        weight: ``[cols]``.
        eps: as in `forward`.
        stored: as in `forward`, and of the gradient through the norm, which may be rounded before the other is added.

    Returns:
        The gradients of x, residual and weight; the first two are the same.
    """
    through_norm, grad_weight = rms_norm.backward(grad_y, stored(x + residual), weight, eps)
    grad_sum = stored(through_norm) + grad_residual_out
    return grad_sum, grad_sum, grad_weight
