"""Argument checks of rope, the same for every backend."""

from typing import Any

import torch

from fourfold.backends.arguments import check_alike, check_axes, check_floating, check_same


def check_rope(x: Any, cos: Any, sin: Any, positions: Any, interleaved: Any) -> None:
    """Check ``x[..., seq, heads, dim]``, ``cos[positions, half]``, sin like it, and int64 ``positions[..., seq]``.

    The values of positions are checked only on the CPU and outside torch.compile, since on a GPU that would wait for
    the device. Elsewhere, a token whose position is out of range is NaN, and nothing is read outside of the tensors.

    Raises:
        TypeError: a tensor is none, a dtype is wrong, or interleaved is no bool.
        ValueError: shapes or devices do not fit, or a position has no row of cos.
    """
    check_floating("x", x)
    if x.ndim < 3:
        raise ValueError(f"x must be [..., seq, heads, dim], not {list(x.shape)}")
    check_alike("cos", cos, "x", x)
    check_axes("cos", cos, "[positions, half]", 2)
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(f"cos must have at most half of the {x.shape[-1]} columns of x, not {cos.shape[1]}")
    check_same("sin", sin, "cos", cos)
    if positions is None and len(cos) < x.shape[-3]:
        raise ValueError(f"cos must have a row for each of the {x.shape[-3]} tokens of x, not {len(cos)} rows")
    if positions is not None:
        _check_positions(x, len(cos), positions)
    if not isinstance(interleaved, bool):
        raise TypeError(f"interleaved must be a bool, not {type(interleaved).__name__}")


def _check_positions(x: torch.Tensor, most: int, positions: Any) -> None:
    if not isinstance(positions, torch.Tensor) or positions.dtype != torch.int64:
        given = positions.dtype if isinstance(positions, torch.Tensor) else type(positions).__name__
        raise TypeError(f"positions must be an int64 tensor, not {given}")
    if positions.device != x.device:
        raise ValueError(f"positions must be on the device of x, {x.device}, not on {positions.device}")
    if positions.shape != x.shape[:-2]:
        raise ValueError(f"positions must be [..., seq] = {list(x.shape[:-2])}, not {list(positions.shape)}")
    if positions.is_cpu and not torch.compiler.is_compiling() and positions.numel():
        least, largest = (int(end) for end in positions.aminmax())
        if least < 0 or largest >= most:
            raise ValueError(f"positions must be from 0 to {most - 1}, the rows of cos, not {least} to {largest}")
