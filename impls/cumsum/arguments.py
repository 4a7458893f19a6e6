"""Argument checks of cumsum, the same for every backend."""

from typing import Any

import torch

from fourfold.backends.arguments import check_axes, check_floating, check_last_axis


def check_cumsum(x: Any, offsets: Any, exclusive: Any, reverse: Any) -> None:
    """Check ``x[..., n]``, integer ``offsets[segments + 1]`` that rise from 0 to n, or None, and two bools.

    The values of offsets are checked only on the CPU and outside torch.compile, since on a GPU that would wait for the
    device. Elsewhere, invalid offsets make the output NaN, and nothing outside of the tensors is accessed.

    Raises:
        TypeError: x is no floating-point tensor, offsets no int32 or int64 one, or exclusive or reverse no bool.
        ValueError: a shape is wrong, devices differ, or offsets do not rise from 0 to n.
    """
    check_floating("x", x)
    check_last_axis("x", x)
    if offsets is not None:
        _check_offsets(x, offsets)
    for name, given in (("exclusive", exclusive), ("reverse", reverse)):
        if not isinstance(given, bool):
            raise TypeError(f"{name} must be a bool, not {type(given).__name__}")


def _check_offsets(x: torch.Tensor, offsets: Any) -> None:
    if not isinstance(offsets, torch.Tensor) or offsets.dtype not in (torch.int32, torch.int64):
        given = offsets.dtype if isinstance(offsets, torch.Tensor) else type(offsets).__name__
        raise TypeError(f"offsets must be an int32 or int64 tensor, not {given}")
    if offsets.device != x.device:
        raise ValueError(f"offsets must be on the device of x, {x.device}, not on {offsets.device}")
    check_axes("offsets", offsets, "[segments + 1]", 1)
    n = x.shape[-1]
    if not len(offsets) or (len(offsets) == 1 and n):
        raise ValueError(f"offsets must have a segment for the {n} columns of x, but has {len(offsets)} numbers")
    known = offsets.is_cpu and not torch.compiler.is_compiling()
    if known and (offsets[0] != 0 or offsets[-1] != n or bool((offsets.diff() < 0).any())):
        raise ValueError(f"offsets must rise from 0 to {n}, the columns of x, and not be {offsets.tolist()}")
