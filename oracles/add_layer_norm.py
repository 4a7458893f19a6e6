"""A residual that is added to x, and the layer normalization of the sum: the reference."""

from collections.abc import Callable
from typing import Any

from . import layer_norm
from .add_rms_norm import unchanged

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def forward(
    x: Array,
    residual: Array,
    weight: Array,
    bias: Array,
    eps: float = 1e-5,
    stored: Callable[[Array], Array] = unchanged,
    norm: Callable[..., Array] = layer_norm.forward,
) -> tuple[Array, Array]:
    """Return ``h = x + residual``, and ``y = layer_norm(h)``: y and h, ``[..., cols]``.

    Args:
        x: ``[..., cols]``, float64 or wider.
        residual: ``[..., cols]``.
        weight: ``[cols]``.
        bias: ``[cols]``.
        eps: added to the variance.
        stored: rounds an intermediate result to the dtype of the tensors, as a kernel may the sum that it normalizes.
        norm: the normalization.
    """
    h = x + residual
    return norm(stored(h), weight, bias, eps), h


def backward(
    grad_y: Array,
    grad_h: Array,
    x: Array,
    residual: Array,
    weight: Array,
    bias: Array,
    eps: float = 1e-5,
    stored: Callable[[Array], Array] = unchanged,
    norm: Callable[..., tuple[Array, Array, Array]] = layer_norm.backward,
) -> tuple[Array, Array, Array, Array]:
    """Return gradients of ``sum(grad_y * y) + sum(grad_h * h)`` for x, residual (the same), weight and bias.

    Arguments are as in `forward`. The gradient through the norm may be rounded before the other is added.
    """
    through_norm, grad_weight, grad_bias = norm(grad_y, stored(x + residual), weight, bias, eps)
    grad_sum = stored(through_norm) + grad_h
    return grad_sum, grad_sum, grad_weight, grad_bias
