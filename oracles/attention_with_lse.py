"""attention with its log-sum-exp: the reference of the second output. The first one is attention's."""

from typing import Any

import numpy as np

from .attention import Array, group_heads, scores_of, sequences, visible_by_head


def forward(
    q: Array, k: Array, v: Array, q_offsets: Any = None, k_offsets: Any = None, causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    slopes: Array | None = None,
) -> Array:  # fmt: skip
    """Return the log-sum-exp over visible keys, ``log(sum(exp(score)))``; arguments as `attention.forward`.

    Returns:
        ``[heads, total_q]``; -inf where a query sees no key.

    Source: Dao, FlashAttention-2, 2023, section 3.1.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    lse = np.swapaxes(np.zeros_like(q[..., 0]), 0, 1)
    for queries, keys, visible, distance in sequences(q, k, q_offsets, k_offsets, causal, window):
        every = visible_by_head(visible, heads, kv_heads)
        scores = scores_of(group_heads(q[queries], kv_heads), group_heads(k[keys], kv_heads), scale, slopes, distance)
        lse[:, queries] = log_sum_exp(scores, every).reshape(heads, len(visible))
    return lse


def log_sum_exp(scores: Array, visible: np.ndarray) -> Array:
    """Return the logarithm of the sum of the exponentials of each row's visible scores; -inf where it has none."""
    some = visible.any(axis=-1)
    scores = np.where(visible, scores, -np.inf)
    largest = np.where(some, np.max(scores, axis=-1, initial=-np.inf), 0.0)
    total = np.sum(np.exp(scores - largest[..., np.newaxis]), axis=-1)
    return np.where(some, largest + np.log(np.where(some, total, 1.0)), -np.inf)
