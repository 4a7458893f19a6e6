"""Argument checks of embedding, the same for every backend."""

from typing import Any

import torch

from fourfold.backends.arguments import check_axes, check_floating


def check_embedding(table: Any, ids: Any, padding_idx: Any) -> None:
    """Check ``table[vocab, dim]``, int32 or int64 ids of any shape, and a row of the table or None.

    The values of ids are checked only on the CPU and outside torch.compile, since on a GPU that would wait for the
    device. Elsewhere, the row of an id that is out of range is NaN, and nothing is read outside of the tensors.

    Raises:
        TypeError: a tensor is none, a dtype is wrong, or padding_idx is no integer.
        ValueError: shapes or devices do not fit, or an id or padding_idx is no row of the table.
    """
    check_floating("table", table)
    check_axes("table", table, "[vocab, dim]", 2)
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64):
        given = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TypeError(f"ids must be an int32 or int64 tensor, not {given}")
    if ids.device != table.device:
        raise ValueError(f"ids must be on the device of table, {table.device}, not on {ids.device}")
    if padding_idx is not None:
        if isinstance(padding_idx, bool) or not isinstance(padding_idx, int | torch.SymInt):
            raise TypeError(f"padding_idx must be an integer or None, not {type(padding_idx).__name__}")
        if not 0 <= padding_idx < table.shape[0]:
            raise ValueError(f"padding_idx must be from 0 to {table.shape[0] - 1}, a row of table, not {padding_idx}")
    if ids.is_cpu and not torch.compiler.is_compiling() and ids.numel():
        least, largest = (int(end) for end in ids.aminmax())
        if least < 0 or largest >= table.shape[0]:
            raise ValueError(f"ids must be from 0 to {table.shape[0] - 1}, rows of table, not {least} to {largest}")
