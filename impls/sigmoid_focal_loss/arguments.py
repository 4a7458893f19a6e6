"""Argument checks of sigmoid_focal_loss, the same for every backend."""

import math
from typing import Any

from fourfold.backends.arguments import check_choice, check_floating, check_not_negative, check_same

REDUCTIONS = ("none", "mean", "sum")


def check_sigmoid_focal_loss(logits: Any, targets: Any, alpha: float, gamma: float, reduction: str) -> None:
    """Check two floating-point tensors of one shape, dtype and device, alpha up to 1, gamma from 0, and the reduction.

    Raises:
        TypeError: logits is no floating-point tensor, targets has another dtype, or a parameter has another type.
        ValueError: shapes or devices differ, or a parameter is out of its range.
    """
    check_floating("logits", logits)
    check_same("targets", targets, "logits", logits)
    if not isinstance(alpha, (int, float)):
        raise TypeError(f"alpha must be a number, not {type(alpha).__name__}")
    if not -math.inf < alpha <= 1:
        raise ValueError(f"alpha must be finite and not above 1, not {alpha}")
    check_not_negative("gamma", gamma)
    check_choice("reduction", reduction, REDUCTIONS)
