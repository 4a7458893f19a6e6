"""A product of quantised matrices with a scale for each block of them: the reference."""

from typing import Any

import numpy as np

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any

# Terms that share a scale of a, and of b, and columns of the result that share a scale of b.
BLOCK = 128
# In which order a sum and its two scales are multiplied. The value is the same; what a step may round is not.
ORDERS = ("scales first", "scale of a first", "scale of b first", "dequantised")


def blocks(extent: int) -> int:
    """Return the number of blocks of `BLOCK` in an extent; the last one may be shorter."""
    return -(-extent // BLOCK)


def forward(
    a: Array, b: Array, scale_a: Array, scale_b: Array, out_dtype: Any = None, order: str = "scales first"
) -> Array:
    """Return ``c[i, j] = sum over blocks p of scale_a[i, p] scale_b[j // 128, p] sum over q in p of a[i, q] b[j, q]``.

    A block p holds the terms from 128 p on, 128 of them or, the last one, fewer.

    Args:
        a: ``[m, k]``, float64 or wider.
        b: ``[n, k]``.
        scale_a: ``[m, ceil(k / 128)]``.
        scale_b: ``[ceil(n / 128), ceil(k / 128)]``.
        out_dtype: the dtype of the result, which says nothing of its value.
        order: one of `ORDERS`.

    Returns:
        ``[m, n]``; zeros if k is 0.
    """
    n, k = b.shape
    if not k:
        return a @ np.transpose(b)
    row_of_scale = np.arange(n) // BLOCK
    parts = []
    if order == "dequantised":
        column_of_scale = np.arange(k) // BLOCK
        return (a * scale_a[:, column_of_scale]) @ np.transpose(b * scale_b[row_of_scale][:, column_of_scale])
    for p in range(blocks(k)):
        terms = slice(p * BLOCK, (p + 1) * BLOCK)
        of_rows, of_columns = scale_a[:, p : p + 1], scale_b[row_of_scale, p][None, :]
        sums = a[:, terms] @ np.transpose(b[:, terms])
        if order == "scales first":
            parts.append(sums * (of_rows * of_columns))
        elif order == "scale of a first":
            parts.append(sums * of_rows * of_columns)
        else:
            parts.append(sums * of_columns * of_rows)
    return np.sum(np.stack(parts), axis=0)
