"""Matrix multiplication, followed by an activation: the reference."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .ties import tie_derivative

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def unchanged(x: Array) -> Array:
    """Return an intermediate result without rounding it."""
    return x


def preactivation(a: Array, b: Array, activation: str, stored: Callable[[Array], Array]) -> Array:
    """Return a @ b as the activation reads it. Kernels without fusion first round it to the dtype of the output."""
    product = a @ b
    return product if activation == "none" else stored(product)


def forward(
    a: Array,
    b: Array,
    activation: str = "none",
    negative_slope: float = 0.01,
    stored: Callable[[Array], Array] = unchanged,
) -> Array:
    """Return activation(a @ b).

    Args:
        a: ``[m, k]``, float64 or wider.
        b: ``[k, n]``.
        activation: "none"; "relu", ``max(x, 0)``; or "leaky_relu", ``x where x > 0, else negative_slope x``.
        negative_slope: the slope of leaky_relu below 0.
        stored: rounds an intermediate result to the dtype of the output.

    Returns:
        ``[m, n]``; zeros if k is 0.
    """
    product = preactivation(a, b, activation, stored)
    if activation == "relu":
        return np.maximum(product, 0.0)
    if activation == "leaky_relu":
        return np.where(product > 0.0, product, product * negative_slope)
    return product


def backward(
    grad_output: Array,
    a: Array,
    b: Array,
    activation: str = "none",
    negative_slope: float = 0.01,
    stored: Callable[[Array], Array] = unchanged,
) -> tuple[Array, Array]:
    """Return gradients of ``sum(grad_output * forward(a, b, activation, negative_slope))``.

    Args:
        grad_output: ``[m, n]``.
        a: ``[m, k]``.
        b: ``[k, n]``.
        activation: as in `forward`; at 0 the documented slope is 0 for relu and negative_slope for leaky_relu.
        negative_slope: as in `forward`.
        stored: as in `forward`.

    Returns:
        The gradients of a, ``g b^T``, and b, ``a^T g``, with ``g = grad_output activation'(a b)``.
    """
    grad = grad_output
    if activation != "none":
        product = preactivation(a, b, activation, stored)
        if activation == "relu":
            none = np.zeros_like(grad_output)
            tie = tie_derivative(none, none, grad_output)
            grad = np.where(product < 0.0, 0.0, np.where(product == 0.0, tie, grad_output))
        else:
            scaled = grad_output * negative_slope
            tie = tie_derivative(scaled, scaled, grad_output)
            grad = stored(np.where(product > 0.0, grad_output, np.where(product == 0.0, tie, scaled)))
    return grad @ np.transpose(b), np.transpose(a) @ grad
