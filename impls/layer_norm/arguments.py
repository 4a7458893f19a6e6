"""Argument checks of layer_norm, the same for every backend."""

from typing import Any

from fourfold.backends.arguments import check_alike, check_axes, check_floating, check_last_axis, check_positive


def check_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> None:
    """Check x ``[..., cols]``, weight and bias ``[cols]`` of the same dtype and device, and a positive eps.

    Raises:
        TypeError: a tensor is none, of integers, the dtypes differ, or eps is no number.
        ValueError: x has no axis, weight or bias is not ``[cols]``, devices differ, or eps is not positive.
    """
    check_floating("x", x)
    check_last_axis("x", x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        check_alike(name, tensor, "x", x)
        check_axes(name, tensor, "[cols]", 1, x.shape[-1])
    check_positive("eps", eps)
