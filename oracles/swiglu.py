"""swiglu: the reference."""

from typing import Any

import numpy as np

Array = Any


def sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))``. No exponential is above 1, so none overflows."""
    power = np.exp(-abs(x))
    return np.where(x < 0, power, 1) / (1 + power)


def forward(gate: Array, up: Array) -> Array:
    """Return ``gate * sigmoid(gate) * up``, all of one shape ``[...]``."""
    return gate * sigmoid(gate) * up


def backward(grad_output: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Return the gradients of ``sum(grad_output * forward(gate, up))`` for gate and for up."""
    slope = sigmoid(gate) * (1 + gate * sigmoid(-gate))
    return grad_output * (up * slope), grad_output * (gate * sigmoid(gate))
