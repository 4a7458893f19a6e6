"""paged_attention: the reference."""

from collections.abc import Callable
from typing import Any

import numpy as np

from . import attention

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def forward(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    page_table: np.ndarray,
    lengths: np.ndarray,
    scale: float,
    attend: Callable[..., Array] = attention.forward,
) -> Array:
    """Return ``softmax(scale q k^T) v`` of a query per sequence and head, over the sequence's tokens in the cache.

    Args:
        q: ``[sequences, heads, head_size]``.
        k_cache: ``[pages, page_size, kv_heads, head_size]``.
        v_cache: like k_cache.
        page_table: ``[sequences, pages_per_sequence]``. Token t of sequence s is at ``t % page_size`` of the page
            ``page_table[s, t // page_size]``.
        lengths: ``[sequences]``, the tokens of each sequence.
        scale: of the scores.
        attend: the attention of one sequence.

    Returns:
        ``[sequences, heads, head_size]``; zeros for a sequence without tokens.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
    """
    output = np.zeros_like(q)
    for sequence, length in enumerate(lengths.tolist()):
        if length:
            pages = page_table[sequence, : -(-length // k_cache.shape[1])]
            tokens = len(pages) * k_cache.shape[1]
            k, v = (x[pages].reshape(tokens, *x.shape[2:])[:length] for x in (k_cache, v_cache))
            output[sequence : sequence + 1] = attend(q[sequence : sequence + 1], k, v, scale=scale)
    return output
