"""Matrix multiplication with an activation of its result: the reference."""

from collections.abc import Callable
from typing import Any

import numpy as np

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def unchanged(x: Array) -> Array:
    """What becomes of an intermediate result that is not rounded."""
    return x


def preactivation(a: Array, b: Array, activation: str, stored: Callable[[Array], Array]) -> Array:
    """a @ b as the activation sees it: kernels without fusion round it to the type of the output in between."""
    product = a @ b
    return product if activation == "none" else stored(product)


def forward(
    a: Array,
    b: Array,
    activation: str = "none",
    negative_slope: float = 0.01,
    stored: Callable[[Array], Array] = unchanged,
) -> Array:
    """activation(a @ b).

    Args:
        a: ``[m, k]``, float64 or wider.
        b: ``[k, n]``.
        activation: "none"; "relu", ``max(x, 0)``; or "leaky_relu", ``x where x > 0, else negative_slope x``.
        negative_slope: of leaky_relu.
        stored: rounds an intermediate result to the type of the output.

    Returns:
        ``[m, n]``. Without terms, where k is 0, zeros.
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
    """Gradients of ``sum(grad_output * forward(a, b, activation, negative_slope))``.

    Args:
        grad_output: ``[m, n]``.
        a: ``[m, k]``.
        b: ``[k, n]``.
        activation: as in `forward`; at 0 the slope is 0 for relu and negative_slope for leaky_relu.
        negative_slope: as in `forward`.
        stored: as in `forward`.

    Returns:
        The gradients of a, ``g b^T``, and b, ``a^T g``, with ``g = grad_output activation'(a b)``.
    """
    grad = grad_output
    if activation != "none":
        product = preactivation(a, b, activation, stored)
        if activation == "relu":
            grad = np.where(product <= 0.0, 0.0, grad_output)
        else:
            grad = stored(np.where(product > 0.0, grad_output, grad_output * negative_slope))
    return grad @ np.transpose(b), np.transpose(a) @ grad
