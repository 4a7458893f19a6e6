"""Checks of tensors, whose errors name the argument."""

from typing import Any

import torch

FLOATING = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def check_floating(name: str, tensor: Any) -> None:
    """Check that `tensor` is a tensor of float16, bfloat16, float32 or float64.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, not {tensor.dtype}")


def check_alike(name: str, tensor: Any, other_name: str, other: torch.Tensor) -> None:
    """Check that `tensor` is a tensor with the dtype and the device of `other`.

    Raises:
        TypeError: it is not a tensor, or has another dtype.
        ValueError: it is on another device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name} must have the dtype of {other_name}, {other.dtype}, not {tensor.dtype}")
    check_device(name, tensor, other_name, other)


def check_device(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Check that `tensor` is on the device of `other`.

    Raises:
        ValueError: it is not.
    """
    if tensor.device != other.device:
        raise ValueError(f"{name} must be on the device of {other_name}, {other.device}, not on {tensor.device}")


def check_same(name: str, tensor: Any, other_name: str, other: torch.Tensor) -> None:
    """Check that `tensor` is a tensor with the dtype, the device and the shape of `other`.

    Raises:
        TypeError: it is not a tensor, or has another dtype.
        ValueError: it is on another device, or has another shape.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != other.dtype or tensor.device != other.device:
        check_alike(name, tensor, other_name, other)
    if tensor.shape != other.shape:
        shapes = f"{list(other.shape)}, not {list(tensor.shape)}"
        raise ValueError(f"{name} must have the shape of {other_name}, {shapes}: nothing is broadcast")
