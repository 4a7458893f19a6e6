"""A product of quantised matrices with a scale for each row of both: the reference."""

from typing import Any

import numpy as np

from .scaled_matmul import Array


def forward(
    a: Array, b: Array, scale_a: Array, scale_b: Array, out_dtype: Any = None, order: str = "scales first"
) -> Array:
    """Return ``c[i, j] = scale_a[i] scale_b[j] sum over q of a[i, q] b[j, q]``.

    Args:
        a: ``[m, k]``, float64 or wider.
        b: ``[n, k]``.
        scale_a: ``[m]``.
        scale_b: ``[n]``.
        out_dtype: the dtype of the result, which says nothing of its value.
        order: one of `scaled_matmul.ORDERS`.

    Returns:
        ``[m, n]``.
    """
    of_rows, of_columns = scale_a[:, None], scale_b[:, None]
    if order == "dequantised":
        return (a * of_rows) @ np.transpose(b * of_columns)
    sums, of_columns = a @ np.transpose(b), np.transpose(of_columns)
    if order == "scales first":
        return sums * (of_rows * of_columns)
    return sums * of_rows * of_columns if order == "scale of a first" else sums * of_columns * of_rows
