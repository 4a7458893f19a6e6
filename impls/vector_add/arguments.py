"""Argument checks of vector_add, the same for every backend."""

from typing import Any

from fourfold.backends.arguments import check_floating, check_same


def check_vector_add(x: Any, y: Any) -> None:
    """Two floating-point tensors of one shape, dtype and device; else a TypeError or ValueError."""
    check_floating("x", x)
    check_same("y", y, "x", x)
