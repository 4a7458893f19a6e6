"""Argument checks of add_layer_norm, the same for every backend."""

from typing import Any

from fourfold.backends.arguments import check_same

from ..layer_norm.arguments import check_layer_norm


def check_add_layer_norm(x: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> None:
    """Check x and residual ``[..., cols]``, weight and bias ``[cols]``, of one dtype and device, and a positive eps.

    Raises:
        TypeError: a tensor is none, of integers, the dtypes differ, or eps is no number.
        ValueError: x has no axis, residual has another shape, weight or bias is not ``[cols]``, devices differ, or eps
            is not positive.
    """
    check_layer_norm(x, weight, bias, eps)
    check_same("residual", residual, "x", x)
