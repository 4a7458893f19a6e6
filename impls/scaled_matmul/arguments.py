"""Argument checks of scaled_matmul, the same for every backend."""

from typing import Any

import torch

from fourfold.backends.arguments import check_axes
from fourfold.backends.launch import cdiv

# Terms that share a scale of a, and of b, and columns of the result that share a scale of b.
BLOCK = 128
QUANTISED, SCALE = torch.float8_e4m3fn, torch.float32
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_scaled_matmul(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any) -> None:
    """Check float8 ``a[m, k]`` and ``b[n, k]``, a float32 scale for each of their blocks, and the result's dtype.

    Raises:
        TypeError: a tensor is none, a dtype is wrong, or out_dtype is no dtype.
        ValueError: a shape is wrong, devices differ, or a result cannot have out_dtype.
    """
    _check_tensor("a", a, QUANTISED, a)
    check_axes("a", a, "[m, k]", 2)
    _check_tensor("b", b, QUANTISED, a)
    (m, k), blocks = a.shape, cdiv(a.shape[1], BLOCK)
    if b.ndim != 2 or b.shape[1] != k:
        raise ValueError(f"b must be [n, k] with k = {k}, the columns of a, not {list(b.shape)}")
    _check_tensor("scale_a", scale_a, SCALE, a)
    _check_shape("scale_a", scale_a, (m, blocks), f"[m, ceil(k / {BLOCK})]")
    _check_tensor("scale_b", scale_b, SCALE, a)
    _check_shape("scale_b", scale_b, (cdiv(b.shape[0], BLOCK), blocks), f"[ceil(n / {BLOCK}), ceil(k / {BLOCK})]")
    if out_dtype not in OUT_DTYPES:
        wrong = ValueError if isinstance(out_dtype, torch.dtype) else TypeError
        raise wrong(f"out_dtype must be torch.float32, torch.bfloat16 or torch.float16, not {out_dtype!r}")


def _check_tensor(name: str, tensor: Any, dtype: torch.dtype, a: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, not {tensor.dtype}")
    if tensor.device != a.device:
        raise ValueError(f"{name} must be on the device of a, {a.device}, not on {tensor.device}")


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, int], axes: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {axes} = {list(shape)}, not {list(tensor.shape)}")


def unsupported(dtype: str, device: str) -> str | None:
    """Return why a dtype is unsupported: results have float32, the dtype of the sums, or a half type."""
    return "sums are kept in float32, so a result cannot have float64" if dtype == "float64" else None
