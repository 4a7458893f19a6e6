"""embedding in torch operations: the baseline."""

import torch

from .arguments import check_embedding


def embedding(table: torch.Tensor, ids: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Return the rows of a table: ``output[...] = table[ids[...]]``.

    Args:
        table: ``[vocab, dim]``; float16, bfloat16, float32 or float64, any strides.
        ids: int32 or int64 of any shape and strides, on the device of table: from 0 to vocab - 1, any of them often.
        padding_idx: a row without a gradient. Its numbers are returned like those of any other row.

    Returns:
        ``[..., dim]`` of the same dtype. Each row of the table's gradient is the sum of the cotangents of its ids,
            added in float32 for half types, and rounded once. It is deterministic: the kernels add them in the order
            of their places. An id out of range gives a row of NaN on a GPU, and adds nothing to the gradient.

    Raises:
        TypeError: a tensor is none, a dtype is wrong, or padding_idx is no integer.
        ValueError: shapes or devices do not fit, or, on the CPU, an id is no row of the table.

    Source: torch.nn.functional.embedding.
    """
    check_embedding(table, ids, padding_idx)
    wide = torch.promote_types(table.dtype, torch.float32)
    known = (ids >= 0) & (ids < table.shape[0])
    # A row more for ids that are out of range: even an empty table has it.
    rows = torch.cat((table.to(wide), table.new_full((1, table.shape[1]), torch.nan, dtype=wide)))
    places = torch.where(known, ids, table.shape[0])
    if table.is_cuda:
        # torch's embedding adds the gradient in any order there, and reads out of bounds if rows have no columns.
        output = rows[places]
        if padding_idx is not None:
            output = torch.where((places == padding_idx).unsqueeze(-1), output.detach(), output)
        return output.to(table.dtype)
    return torch.nn.functional.embedding(places, rows, padding_idx).to(table.dtype)
