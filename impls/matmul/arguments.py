"""Argument checks of matmul, the same for every backend."""

from typing import Any

from fourfold.backends.arguments import check_alike, check_axes, check_choice, check_floating, check_not_negative

ACTIVATIONS = ("none", "relu", "leaky_relu")


def check_matmul(a: Any, b: Any, activation: str, negative_slope: float) -> None:
    """Check ``a[m, k]`` and ``b[k, n]`` of one dtype and device, a known activation, and a slope of 0 or more.

    Raises:
        TypeError: a tensor is none, of integers, the dtypes differ, or a parameter has another type.
        ValueError: a shape is wrong, devices differ, the activation is unknown, or the slope is negative or not finite.
    """
    check_floating("a", a)
    check_alike("b", b, "a", a)
    check_axes("a", a, "[m, k]", 2)
    if b.ndim != 2 or b.shape[0] != a.shape[1]:
        raise ValueError(f"b must be [k, n] with k = {a.shape[1]}, the columns of a, not {list(b.shape)}")
    check_choice("activation", activation, ACTIVATIONS)
    # The sign of the output must be that of what the activation was given: backward goes by it.
    check_not_negative("negative_slope", negative_slope)
