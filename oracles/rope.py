"""rope: the reference."""

from typing import Any

import numpy as np

Array = Any


def rotate(x: Array, cos: Array, sin: Array, positions: Any, interleaved: bool) -> Array:
    """Return x with each pair ``(first, second)`` of its first elements turned by the angle of its token's position."""
    at = np.broadcast_to(np.arange(x.shape[-3]), x.shape[:-2]) if positions is None else positions
    c, s, half = cos[at][..., None, :], sin[at][..., None, :], cos.shape[-1]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    turned = first * c - second * s, second * c + first * s
    both = np.stack(turned, -1).reshape((*x.shape[:-1], 2 * half)) if interleaved else np.concatenate(turned, -1)
    return np.concatenate([both, x[..., 2 * half :]], -1)


def forward(x: Array, cos: Array, sin: Array, positions: Any = None, interleaved: bool = False) -> Array:
    """Rotate ``x[..., seq, heads, dim]`` by ``cos`` and ``sin``, ``[positions, half]``, at ``positions[..., seq]``."""
    return rotate(x, cos, sin, positions, interleaved)


def backward(
    grad_output: Array, x: Array, cos: Array, sin: Array, positions: Any = None, interleaved: bool = False
) -> tuple[Array]:
    """Return the gradient of ``sum(grad_output * forward(x, ...))`` for x: the cotangent, turned back."""
    return (rotate(grad_output, cos, -sin, positions, interleaved),)
