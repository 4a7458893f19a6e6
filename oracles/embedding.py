"""embedding: the reference."""

from typing import Any

import numpy as np

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def forward(table: Array, ids: np.ndarray, padding_idx: int | None = None) -> Array:
    """Return ``table[ids]``: ``[..., dim]`` from ``table[vocab, dim]`` and ids of any shape."""
    return table[ids]


def backward(grad_output: Array, table: Array, ids: np.ndarray, padding_idx: int | None = None) -> tuple[Array]:
    """Return the gradient of ``sum(grad_output * table[ids])`` for the table.

    A row's gradient is the sum of the cotangents of its ids, and 0 where it has none or is the row `padding_idx`.
    """
    flat, gradient = ids.reshape(-1), np.zeros_like(table)
    terms = grad_output.reshape(len(flat), table.shape[1])
    order = np.argsort(flat, kind="stable")
    rows, starts, counts = np.unique(flat[order], return_index=True, return_counts=True)
    counts = np.where(rows == padding_idx, 0, counts)
    for count in set(counts.tolist()) - {0}:  # the rows of as many terms are summed together
        alike = counts == count
        places = order[starts[alike][:, None] + np.arange(count)]
        gradient[rows[alike]] = np.sum(terms[places], axis=1)
    return (gradient,)
