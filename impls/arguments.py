"""Checks of arguments that operations share; each error names the argument."""

from typing import Any

import torch

FLOATING = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def check_floating(name: str, tensor: Any) -> None:
    """`tensor` must be a tensor of float16, bfloat16, float32 or float64.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, not {tensor.dtype}")


def check_alike(name: str, tensor: Any, other_name: str, other: torch.Tensor) -> None:
    """`tensor` must be a tensor with the dtype and the device of `other`.

    Raises:
        TypeError: it is no tensor, or has another dtype.
        ValueError: it is on another device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name} must have the dtype of {other_name}, {other.dtype}, not {tensor.dtype}")
    if tensor.device != other.device:
        raise ValueError(f"{name} must be on the device of {other_name}, {other.device}, not on {tensor.device}")


def check_positive(name: str, number: float) -> None:
    """`number` must be above 0 and finite.

    Raises:
        ValueError: it is not.
    """
    if not 0.0 < number < float("inf"):
        raise ValueError(f"{name} must be positive and finite, not {number}")
