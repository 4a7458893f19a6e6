"""Checks of the arguments of vector_add, the same for every backend."""

from typing import Any

from impls.arguments import check_alike, check_floating


def check_vector_add(x: Any, y: Any) -> None:
    """Two tensors of one shape, dtype and device.

    Raises:
        TypeError: one is no tensor, of integers, or the dtypes differ.
        ValueError: shapes or devices differ: nothing is broadcast.
    """
    check_floating("x", x)
    check_alike("y", y, "x", x)
    if x.shape != y.shape:
        raise ValueError(
            f"y must have the shape of x, {list(x.shape)}, not {list(y.shape)}: vector_add does not broadcast"
        )
