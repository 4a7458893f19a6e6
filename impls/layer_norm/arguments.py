"""Checks of the arguments of layer_norm, the same for every backend."""

from typing import Any

from impls.arguments import check_alike, check_floating, check_positive


def check_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> None:
    """A tensor ``[..., cols]``, weight and bias ``[cols]`` of the same dtype and device, and a positive eps.

    Raises:
        TypeError: a tensor is none, of integers, or the dtypes differ.
        ValueError: x has no axis, weight or bias is not ``[cols]``, devices differ, or eps is not positive.
    """
    check_floating("x", x)
    if x.ndim == 0:
        raise ValueError("x must have a last axis, but has none")
    for name, tensor in (("weight", weight), ("bias", bias)):
        check_alike(name, tensor, "x", x)
        if tensor.shape != x.shape[-1:]:
            raise ValueError(f"{name} must be [cols] = [{x.shape[-1]}], not {list(tensor.shape)}")
    check_positive("eps", eps)
