"""Argument checks of attention, the same for every backend."""

import math
from typing import Any

import torch

from fourfold.backends.arguments import check_alike, check_axes, check_floating, check_positive, check_same

MOST_COLUMNS = 256  # of a head
MOST_TOKENS = 2**31 - 2**16  # kernels count the tokens of a sequence in 32 bits


def check_attention(
    q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any, causal: Any, scale: Any, window: Any = (-1, -1)
) -> None:
    """Check ``q[total_q, heads, head_size]``, k and v ``[total_k, kv_heads, head_size]``, and the rest.

    The values of offsets are checked only on the CPU and outside torch.compile, since on a GPU that would wait for the
    device. Elsewhere, invalid offsets make all results NaN, and nothing is read or written outside of the tensors.

    Raises:
        TypeError: a tensor is none, dtypes differ, offsets are no integers, causal is no bool, scale is no number, or
            window is no pair of integers.
        ValueError: shapes or devices do not fit, head_size is not from 1 to 256, there are 2^31 tokens, heads is no
            multiple of kv_heads, offsets do not fit, scale is not positive and finite, or window is
            below -1.
    """
    check_floating("q", q)
    check_axes("q", q, "[total_q, heads, head_size]", 3)
    if not 1 <= q.shape[2] <= MOST_COLUMNS:
        raise ValueError(f"q must have a head_size from 1 to {MOST_COLUMNS}, not {q.shape[2]}")
    check_alike("k", k, "q", q)
    check_axes("k", k, "[total_k, kv_heads, head_size]", 3, q.shape[2])
    check_same("v", v, "k", k)
    heads, kv_heads = q.shape[1], k.shape[1]
    if max(len(q), len(k)) > MOST_TOKENS:
        raise ValueError(f"q and k must have at most {MOST_TOKENS} tokens, not {len(q)} and {len(k)}")
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"k must have a number of heads that divides the {heads} of q, not {kv_heads}")
    if q_offsets is None and k_offsets is not None:
        raise ValueError("q_offsets must be given where k_offsets are")
    if q_offsets is not None:
        _check_offsets(q, k, q_offsets, k_offsets)
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, not {type(causal).__name__}")
    if scale is not None:
        check_positive("scale", scale)
    if not isinstance(window, tuple | list) or any(type(each) is not int for each in window):
        raise TypeError(f"window must be a pair of integers, not {window!r}")
    if len(window) != 2 or min(window) < -1:
        raise ValueError(f"window must be a pair of integers from -1 on, not {window!r}")
    if q_offsets is not None and q_offsets.is_cpu and not torch.compiler.is_compiling():
        check_offset_values("q_offsets", q_offsets, "q", q.shape[0])
        if k_offsets is not None:
            check_offset_values("k_offsets", k_offsets, "k", k.shape[0])


def _check_offsets(q: torch.Tensor, k: torch.Tensor, q_offsets: Any, k_offsets: Any) -> None:
    for name, offsets in (("q_offsets", q_offsets), ("k_offsets", k_offsets)):
        if offsets is None:
            continue
        if not isinstance(offsets, torch.Tensor) or offsets.dtype not in (torch.int32, torch.int64):
            given = offsets.dtype if isinstance(offsets, torch.Tensor) else type(offsets).__name__
            raise TypeError(f"{name} must be an int32 or int64 tensor, not {given}")
        if offsets.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, not on {offsets.device}")
        if offsets.ndim != 1 or not len(offsets):
            raise ValueError(f"{name} must be [batch + 1], not {list(offsets.shape)}")
    if k_offsets is None:
        if q.shape[0] != k.shape[0]:
            raise ValueError(f"k_offsets must be given where q has {q.shape[0]} tokens and k {k.shape[0]}")
    elif k_offsets.shape != q_offsets.shape:
        raise ValueError(f"k_offsets must be as many as q_offsets, {len(q_offsets)}, not {len(k_offsets)}")


def check_offset_values(name: str, offsets: torch.Tensor, of: str, total: int) -> None:
    """Check that offsets rise from 0 to total.

    Raises:
        ValueError: they do not.
    """
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != total:
        raise ValueError(f"{name} must run from 0 to the {total} tokens of {of}, not {first} to {last}")
    falls = offsets.diff() < 0
    if bool(falls.any()):
        raise ValueError(f"{name} must never fall, but do after position {int(falls.nonzero()[0])}")


def scale_of(q: torch.Tensor, scale: float | None) -> float:
    """Return the scale, by default ``1 / sqrt(head_size)``."""
    return 1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale)
