"""topk: the reference."""

from typing import Any

import numpy as np

Array = Any


def order(x: np.ndarray, largest: bool = True) -> np.ndarray:
    """Return places of ``x[..., n]`` along the last axis, from the largest, or the smallest, number to the other end.

    NaN is above all numbers. Of equal numbers, -0 and 0 among them, the lower place comes first.
    """
    if largest:  # a stable order of the reversed axis has the higher of equal places first
        return x.shape[-1] - 1 - np.argsort(x[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    return np.argsort(x, axis=-1, kind="stable")


def forward(x: np.ndarray, k: int, largest: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return the first k numbers of ``x[..., n]`` in that order, and their places: ``[..., k]`` both."""
    indices = order(x, largest)[..., :k]
    return np.take_along_axis(x, indices, axis=-1), indices


def backward(grad_values: Array, x: np.ndarray, k: int, largest: bool = True) -> Array:
    """Return the gradient of ``sum(grad_values * values)``: each cotangent at its number's place, and 0 elsewhere."""
    gradient = np.zeros(x.shape, dtype=grad_values.dtype)
    np.put_along_axis(gradient, order(x, largest)[..., :k], grad_values, axis=-1)
    return gradient
