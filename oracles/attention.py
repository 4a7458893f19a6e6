"""attention: the reference."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def unchanged(x: Array) -> Array:
    """Return an intermediate result without rounding it."""
    return x


class Sequence(NamedTuple):
    """One sequence of the batch.

    Attributes:
        queries: its rows of q.
        keys: its rows of k and v.
        visible: ``[queries, keys]`` booleans: which keys each query attends to.
        distance: ``[queries, keys]``, between each query's place among the keys and each key.
    """

    queries: slice
    keys: slice
    visible: np.ndarray
    distance: np.ndarray


def sequences(
    q: Array, k: Array, q_offsets: Any, k_offsets: Any, causal: bool, window: tuple[int, int] = (-1, -1)
) -> Iterator[Sequence]:
    """Yield a call's sequences. Causal: the last query sees all keys, and each query before it one less."""
    ends_q = np.array([0, q.shape[0]]) if q_offsets is None else np.asarray(q_offsets)
    ends_k = np.asarray(k_offsets) if k_offsets is not None else ends_q if q_offsets is not None else [0, k.shape[0]]
    for first_q, end_q, first_k, end_k in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:]):
        place = np.arange(end_q - first_q)[:, None] + (end_k - first_k) - (end_q - first_q)
        ahead = np.arange(end_k - first_k) - place
        left, right = window[0], 0 if causal else window[1]
        visible = (ahead >= -left if left >= 0 else ahead == ahead) & (ahead <= right if right >= 0 else True)
        yield Sequence(slice(int(first_q), int(end_q)), slice(int(first_k), int(end_k)), visible, abs(ahead))


def group_of(heads: int, kv_heads: int) -> int:
    """Return the number of heads that share keys."""
    return heads // kv_heads if kv_heads else 1


def group_heads(rows: Array, kv_heads: int) -> Array:
    """Return ``[rows, heads, d]`` as ``[kv_heads, heads / kv_heads * rows, d]``: heads that share keys lie together."""
    count, heads, d = rows.shape
    group = group_of(heads, kv_heads)
    return np.transpose(rows.reshape(count, kv_heads, group, d), (1, 2, 0, 3)).reshape(kv_heads, group * count, d)


def ungroup_heads(grouped: Array, heads: int) -> Array:
    """Return the reverse of `group_heads`."""
    kv_heads, rows, d = grouped.shape
    group = group_of(heads, kv_heads)
    count = rows // max(group, 1)
    return np.transpose(grouped.reshape(kv_heads, group, count, d), (2, 0, 1, 3)).reshape(count, heads, d)


def visible_by_head(visible: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Return `Sequence.visible` for the rows of `group_heads`."""
    return np.tile(visible, (group_of(heads, kv_heads), 1))


def softmax(scores: Array, visible: np.ndarray) -> Array:
    """Return the softmax over the visible keys of each row; zeros where a row has none."""
    some = visible.any(axis=-1, keepdims=True)
    scores = np.where(visible, scores, -np.inf)
    largest = np.where(some, np.max(scores, axis=-1, keepdims=True, initial=-np.inf), 0.0)
    terms = np.exp(scores - largest)
    return np.where(visible, terms / np.where(some, np.sum(terms, axis=-1, keepdims=True), 1.0), 0.0)


def forward(
    q: Array,
    k: Array,
    v: Array,
    q_offsets: Any = None,
    k_offsets: Any = None,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    slopes: Array | None = None,
    stored: Callable[[Array], Array] = unchanged,
) -> Array:
    """Return ``softmax(scale q k^T) v`` of each sequence and head.

    Args:
        q: ``[total_q, heads, head_size]``: the queries of one sequence after another.
        k: ``[total_k, kv_heads, head_size]``. Head h of q goes with head ``h // (heads / kv_heads)`` of k and v.
        v: like k.
        q_offsets: ``[batch + 1]`` integers: where the sequences begin in q, and their end. None: there is one.
        k_offsets: the same of k and v; None: as in q.
        causal: of a sequence with n queries and m keys, query i sees the keys up to ``i + m - n``.
        scale: of the scores; by default ``1 / sqrt(head_size)``.
        window: of a sequence with n queries and m keys, query i sees the keys from ``i + m - n - window[0]`` to
            ``i + m - n + window[1]`` alone; -1: all on that side.
        slopes: ``[heads]``; ``-slopes[h] |i + m - n - j|`` is added to the score of query i and key j in head h.
        stored: rounds an intermediate result to the dtype of the tensors, as the operand of a tensor core is.

    Returns:
        ``[total_q, heads, head_size]``; zeros where a query sees no key.

    Source: Vaswani et al., Attention Is All You Need, 2017; Ainslie et al., GQA, 2023, for grouped heads;
        Press et al., Train Short, Test Long, 2022, for slopes.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    output = np.zeros_like(q)
    for queries, keys, visible, distance in sequences(q, k, q_offsets, k_offsets, causal, window):
        of_q, of_k, of_v = (group_heads(x, kv_heads) for x in (q[queries], k[keys], v[keys]))
        scores = scores_of(of_q, of_k, scale, slopes, distance)
        weights = softmax(scores, visible_by_head(visible, heads, kv_heads))
        output[queries] = ungroup_heads(stored(weights) @ of_v, heads)
    return output


def scores_of(q: Array, k: Array, scale: float | None, slopes: Array | None, distance: np.ndarray) -> Array:
    """Return the scores ``scale q k^T - slopes distance``, ``[kv_heads, group * queries, keys]``."""
    scores = q @ np.swapaxes(k, -1, -2)
    scores = scores / np.sqrt(q.shape[-1] * np.ones_like(scores)) if scale is None else scores * scale
    if slopes is None:
        return scores
    bias = slopes.reshape(-1, 1, 1) * distance.astype(np.float64)
    return scores - bias.reshape(scores.shape)


def backward(
    grad_output: Array,
    q: Array,
    k: Array,
    v: Array,
    q_offsets: Any = None,
    k_offsets: Any = None,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    slopes: Array | None = None,
    stored: Callable[[Array], Array] = unchanged,
    grad_lse: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return the gradients of ``sum(grad_output * forward(...))`` for q, k and v.

    With the cotangent ``grad_lse[heads, total_q]`` of the log-sum-exp, whose derivatives by the scores the weights are,
    it is taken from the row sum.

    With the weights p, the cotangent g and ``ds = p (g v^T - rowsum(g output))`` they are ``scale ds k``,
    ``scale ds^T q`` and ``p^T g``. A query that sees no key has no part in them.

    Source: Dao et al., FlashAttention, 2022, appendix B.2.
    """
    heads, kv_heads, factor = q.shape[1], k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    grads = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for queries, keys, visible, distance in sequences(q, k, q_offsets, k_offsets, causal, window):
        of_q, of_k, of_v, grad = (
            group_heads(x, kv_heads) for x in (q[queries], k[keys], v[keys], grad_output[queries])
        )
        every = visible_by_head(visible, heads, kv_heads)
        weights = softmax(scores_of(of_q, of_k, scale, slopes, distance), every)
        rounded = stored(weights)
        delta = np.sum(grad * stored(rounded @ of_v), axis=-1, keepdims=True)
        if grad_lse is not None:
            delta = delta - grad_lse[:, queries].reshape(*weights.shape[:2], 1)
        grad_scores = np.where(every, weights * (grad @ np.swapaxes(of_v, -1, -2) - delta), 0.0)
        # The scale comes before the product, and its rounding, or after it: the two differ where one overflows.
        before, after = stored(grad_scores * factor), stored(grad_scores)
        grad_q = np.maximum(before @ of_k, (after @ of_k) * factor)
        before, after = (np.swapaxes(x, -1, -2) for x in (before, after))
        grads[0][queries] = ungroup_heads(grad_q, heads)
        grads[1][keys] = np.swapaxes(np.maximum(before @ of_q, (after @ of_q) * factor), 0, 1)
        grads[2][keys] = np.swapaxes(np.swapaxes(rounded, -1, -2) @ grad, 0, 1)
    return grads
