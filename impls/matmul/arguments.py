"""Checks of the arguments of matmul, the same for every backend."""

import math
from typing import Any

from impls.arguments import check_alike, check_floating

ACTIVATIONS = ("none", "relu", "leaky_relu")


def check_matmul(a: Any, b: Any, activation: str, negative_slope: float) -> None:
    """``a[m, k]`` and ``b[k, n]`` of one dtype and device, a known activation, and a slope of 0 or more.

    Raises:
        TypeError: a tensor is none, of integers, or the dtypes differ.
        ValueError: a shape is wrong, devices differ, the activation is unknown, or the slope is negative or not finite.
    """
    check_floating("a", a)
    check_alike("b", b, "a", a)
    if a.ndim != 2:
        raise ValueError(f"a must be [m, k], not {list(a.shape)}")
    if b.ndim != 2 or b.shape[0] != a.shape[1]:
        raise ValueError(f"b must be [k, n] with k = {a.shape[1]}, the columns of a, not {list(b.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    # The sign of the output must be that of what the activation was given: backward goes by it.
    if not 0.0 <= negative_slope < math.inf:
        raise ValueError(f"negative_slope must be finite and not below 0, not {negative_slope}")
