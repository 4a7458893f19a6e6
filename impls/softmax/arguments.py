"""Argument checks of softmax, the same for every backend."""

from typing import Any

from fourfold.backends.arguments import check_floating, check_last_axis


def check_softmax(x: Any) -> None:
    """Check that x is a floating-point tensor with at least one axis.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: x has no axis.
    """
    check_floating("x", x)
    check_last_axis("x", x)
