"""Argument checks of add_rms_norm, the same for every backend."""

from typing import Any

from fourfold.backends.arguments import check_same

from ..rms_norm.arguments import check_rms_norm


def check_add_rms_norm(x: Any, residual: Any, weight: Any, eps: float) -> None:
    """Check x and residual ``[..., cols]``, weight ``[cols]``, all of one dtype and device, and a positive eps.

    Raises:
        TypeError: a tensor is none, of integers, the dtypes differ, or eps is no number.
        ValueError: x has no axis, residual has another shape, weight is not ``[cols]``, devices differ, or eps is not
            positive.
    """
    check_rms_norm(x, weight, eps)
    check_same("residual", residual, "x", x)
