"""Checks of the argument of softmax, the same for every backend."""

from typing import Any

from impls.arguments import check_floating


def check_softmax(x: Any) -> None:
    """A tensor with at least one axis.

    Raises:
        TypeError: it is no tensor, or not of floating-point numbers.
        ValueError: it has no axis.
    """
    check_floating("x", x)
    if x.ndim == 0:
        raise ValueError("x must have a last axis, but has none")
