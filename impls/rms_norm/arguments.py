"""Argument checks of rms_norm, the same for every backend."""

from typing import Any

from fourfold.backends.arguments import check_alike, check_axes, check_floating, check_last_axis, check_positive


def check_rms_norm(x: Any, weight: Any, eps: float) -> None:
    """Check x ``[..., cols]``, weight ``[cols]`` of the same dtype and device, and a positive eps.

    Raises:
        TypeError: a tensor is none, of integers, the dtypes differ, or eps is no number.
        ValueError: x has no axis, weight is not ``[cols]``, devices differ, or eps is not positive.
    """
    check_floating("x", x)
    check_last_axis("x", x)
    check_alike("weight", weight, "x", x)
    check_axes("weight", weight, "[cols]", 1, x.shape[-1])
    check_positive("eps", eps)
