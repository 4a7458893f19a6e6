"""Argument checks of topk, the same for every backend."""

from typing import Any

import torch

from fourfold.backends.arguments import check_floating, check_last_axis


def check_topk(x: Any, k: Any, largest: Any) -> None:
    """Check ``x[..., n]``, an integer k from 0 to n, and a bool.

    Raises:
        TypeError: x is no floating-point tensor, k no integer, or largest no bool.
        ValueError: x has no last axis, or k is below 0 or above n.
    """
    check_floating("x", x)
    check_last_axis("x", x)
    if isinstance(k, bool) or not isinstance(k, int | torch.SymInt):
        raise TypeError(f"k must be an integer, not {type(k).__name__}")
    if not 0 <= k <= x.shape[-1]:
        raise ValueError(f"k must be between 0 and {x.shape[-1]}, the last axis of x, not {k}")
    if not isinstance(largest, bool):
        raise TypeError(f"largest must be a bool, not {type(largest).__name__}")
