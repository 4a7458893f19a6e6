"""Argument checks that operations share. Each error names the argument."""

import math
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


def check_last_axis(name: str, tensor: torch.Tensor, size: int | None = None) -> None:
    """Check that `tensor` has a last axis, of length `size` if given.

    Raises:
        ValueError: it has not.
    """
    if tensor.ndim == 0 or (size is not None and tensor.shape[-1] != size):
        of_size = "" if size is None else f" of {size}"
        raise ValueError(f"{name} must have a last axis{of_size}, but its shape is {list(tensor.shape)}")


def check_axes(name: str, tensor: torch.Tensor, axes: str, count: int, last: int | None = None) -> None:
    """Check that `tensor` has `count` axes, the last of length `last` if given; `axes` describes them in the message.

    Raises:
        ValueError: it has not.
    """
    if tensor.ndim != count or (last is not None and tensor.shape[-1] != last):
        of_size = "" if last is None else f" with a last axis of {last}"
        raise ValueError(f"{name} must be {axes}{of_size}, not {list(tensor.shape)}")


def check_positive(name: str, number: Any) -> None:
    """Check that `number` is above 0 and finite.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not above 0, or not finite.
    """
    try:
        within = 0.0 < number < math.inf
    except TypeError:
        raise TypeError(f"{name} must be a number, not {type(number).__name__}") from None
    if not within:
        raise ValueError(f"{name} must be positive and finite, not {number}")


def check_not_negative(name: str, number: Any) -> None:
    """Check that `number` is 0 or above, and finite.

    Raises:
        TypeError: it is not a number.
        ValueError: it is below 0, or not finite.
    """
    try:
        within = 0.0 <= number < math.inf
    except TypeError:
        raise TypeError(f"{name} must be a number, not {type(number).__name__}") from None
    if not within:
        raise ValueError(f"{name} must be finite and not below 0, not {number}")


def check_choice(name: str, choice: Any, choices: tuple[str, ...]) -> None:
    """Check that `choice` is one of `choices`.

    Raises:
        TypeError: it is not a string.
        ValueError: it is another string.
    """
    if choice not in choices:
        kind = ValueError if isinstance(choice, str) else TypeError
        raise kind(f"{name} must be one of {', '.join(choices)}, not {choice!r}")
