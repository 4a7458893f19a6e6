"""attention in torch operations: the baseline. Nothing waits for the device, so each sequence takes a full product."""

import math
from typing import Any

import torch

from fourfold.backends.signature import flag, offsets, positive, signature, tensor, values

MOST_COLUMNS = 256  # of a head
MOST_TOKENS = 2**31 - 2**16  # kernels count the tokens of a sequence in 32 bits


def check_sizes(
    q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any, causal: bool, scale: Any, window: Any, slopes: Any
) -> None:
    """Check the sizes of axes, which offsets are given, the numbers of the window, and that slopes are constants.

    Raises:
        ValueError: one does not fit.
    """
    (q_tokens, heads, columns), (k_tokens, kv_heads, _) = q.shape, k.shape
    if not 1 <= columns <= MOST_COLUMNS:
        raise ValueError(f"q must have a head_size from 1 to {MOST_COLUMNS}, not {columns}")
    if max(q_tokens, k_tokens) > MOST_TOKENS:
        raise ValueError(f"q and k must have at most {MOST_TOKENS} tokens, not {q_tokens} and {k_tokens}")
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"k must have a number of heads that divides the {heads} of q, not {kv_heads}")
    if q_offsets is None and k_offsets is not None:
        raise ValueError("q_offsets must be given where k_offsets are")
    if q_offsets is not None and k_offsets is None and q_tokens != k_tokens:
        raise ValueError(f"k_offsets must be given where q has {q_tokens} tokens and k {k_tokens}")
    if len(window) != 2 or min(window) < -1:
        raise ValueError(f"window must be a pair of integers from -1 on, not {window!r}")
    if slopes is not None and slopes.requires_grad:
        raise ValueError("slopes must not require a gradient: there is none")


# The signature of attention with and without its log-sum-exp.
described = signature(
    check_sizes,
    q=tensor("total_q heads head_size", says="q must"),
    k=tensor("total_k kv_heads head_size", says="k must"),
    v=tensor("total_k kv_heads head_size", says="v must"),
    q_offsets=offsets("batch", total="total_q", dtype=("int64", "int32"), optional=True),
    k_offsets=offsets("batch", total="total_k", dtype=("int64", "int32"), optional=True),
    causal=flag(),
    scale=positive(0.25, None),
    window=values(
        (-1, -1),
        out_of_range={"below_minus_1": (0, -2), "of_three": (1, 1, 1)},
        of_another_type={"a_number": 4, "none": None, "of_floats": (1.0, 2.0)},
    ),
    slopes=tensor("heads", dtype=torch.float32, optional=True, gradient=False),
)


def scale_of(q: torch.Tensor, scale: float | None) -> float:
    """Return the scale, by default ``1 / sqrt(head_size)``."""
    return 1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale)


@described
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_offsets: torch.Tensor | None = None,
    k_offsets: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(scale q k^T) v`` of each sequence and head: scaled dot product attention over packed sequences.

    Args:
        q: ``[total_q, heads, head_size]``, the queries of one sequence after another; float16, bfloat16, float32 or
            float64, any strides, head_size from 1 to 256.
        k: ``[total_k, kv_heads, head_size]`` of the same dtype and device; heads is a multiple of kv_heads. Head h of q
            goes with head ``h // (heads / kv_heads)`` of k and v.
        v: like k.
        q_offsets: int32 or int64 ``[batch + 1]``, rising from 0 to total_q. Sequence i has the queries from
            ``q_offsets[i]`` to before ``q_offsets[i + 1]``. None: all queries are of one sequence.
        k_offsets: the same of k and v, from 0 to total_k; None: the sequences have as many keys as queries.
        causal: of a sequence with n queries and m keys, query i sees the keys up to ``i + m - n``, so that the last
            query sees all: aligned at the bottom right, as FlashAttention is since 2.1.
        scale: of the scores, positive; by default ``1 / sqrt(head_size)``.
        window: ``(left, right)``, as FlashAttention has it: query i sees the keys from ``i + m - n - left`` to
            ``i + m - n + right`` alone, both included; -1: all on that side. A causal query sees none to the right.
        slopes: float32 ``[heads]``, finite, any strides: ALiBi, as FlashAttention has it. To the scaled score of query
            i and key j in head h, ``-slopes[h] |i + m - n - j|`` is added. There is no gradient of them. None: no bias.

    Returns:
        ``[total_q, heads, head_size]`` of the same dtype. Half types are computed in float32, but kernels round the
        weights, and in backward the gradients of the scores, to the dtype before they multiply. A query that sees no
        key gives zeros, and has the gradient 0. NaN and infinities of another sequence change nothing. What a value of
        v is at a key that a query of the same sequence must not see, is of no matter as long as it is finite. On a GPU,
        invalid offsets make the output NaN.

    Raises:
        TypeError: a tensor is none, dtypes differ, offsets are no integers, causal is no bool, scale is no number,
            window is no pair of integers, or slopes are not float32.
        ValueError: shapes or devices do not fit, head_size is not from 1 to 256, heads is no multiple of kv_heads,
            offsets do not fit (their values on the CPU alone), scale is not positive and finite, window is below -1, or
            slopes require a gradient.

    Source: Vaswani et al., Attention Is All You Need, 2017; Ainslie et al., GQA, 2023; Dao, FlashAttention-2, 2023;
        Press et al., Train Short, Test Long, 2022, for slopes.
    """
    return _attend(False, q, k, v, q_offsets, k_offsets, causal, scale, window, slopes)[0]


@described
def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_offsets: torch.Tensor | None = None,
    k_offsets: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention`, and the log-sum-exp of the scores of each query: parts over several sets of keys merge by it.

    Args:
        q, k, v, q_offsets, k_offsets, causal, scale, window, slopes: as in `attention`.

    Returns:
        The output ``[total_q, heads, head_size]``, and ``log(sum(exp(score)))`` over the keys that each query
        sees, ``[heads, total_q]``, in float32, or in float64 of float64: -inf for a query without keys. Both have
        gradients. With the output o_i and the logarithms l_i over parts of the keys, and l over all keys,
        ``sum(exp(l_i - l) o_i)`` is the output over all. On a GPU, invalid offsets make the output NaN.

    Raises:
        TypeError: as `attention`.
        ValueError: as `attention`.

    Source: Dao, FlashAttention-2, 2023, section 3.1.
    """
    output, lse = _attend(True, q, k, v, q_offsets, k_offsets, causal, scale, window, slopes)
    assert lse is not None
    return output, lse.reshape(q.shape[1], len(q)).contiguous()


def _attend(
    with_lse: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output, and the log-sum-exp ``[kv_heads, group * total_q]`` if it is wanted."""
    q_offsets, k_offsets, causal, scale, window, slopes = given
    factor, wide = scale_of(q, scale), torch.promote_types(q.dtype, torch.float32)
    of_q, of_k, of_v = _group_heads(q.to(wide), k.shape[1]), k.to(wide).transpose(0, 1), v.to(wide).transpose(0, 1)
    of_slopes = None if slopes is None else slopes.to(wide).repeat_interleave(len(q)).reshape_as(of_q[..., :1])
    token_q, token_k = (torch.arange(len(x), device=q.device) for x in (q, k))
    if q_offsets is None:
        ahead = token_k - (token_q + len(k) - len(q))[:, None]
        output, lse = _attend_sequence(
            of_q, of_k, of_v, of_slopes, ahead, _sees(ahead, causal, window), factor, with_lse
        )
        return _ungroup_heads(output, q), lse
    k_offsets = q_offsets if k_offsets is None else k_offsets
    nothing = of_q[:, :0].sum() + of_k[:, :0].sum() + of_v[:, :0].sum()
    output = torch.zeros_like(of_q) + nothing
    lse = torch.full_like(of_q[..., 0], -torch.inf) + nothing if with_lse else None
    for first_q, end_q, first_k, end_k in zip(q_offsets[:-1], q_offsets[1:], k_offsets[:-1], k_offsets[1:]):
        queries, keys = (token_q >= first_q) & (token_q < end_q), (token_k >= first_k) & (token_k < end_k)
        ahead = (token_k - end_k) - (token_q - end_q)[:, None]
        visible = _sees(ahead, causal, window) & queries[:, None] & keys
        own_q = queries.repeat(of_q.shape[1] // max(len(q), 1))
        among_q, among_k = own_q[:, None], keys[:, None]
        # Zeros in place of other sequences: their NaN, times a weight of 0, would be NaN here.
        own = of_q.where(among_q, 0), of_k.where(among_k, 0), of_v.where(among_k, 0)
        found, of_rows = _attend_sequence(*own, of_slopes, ahead, visible, factor, with_lse)
        output = torch.where(among_q, found, output)
        lse = None if lse is None or of_rows is None else torch.where(own_q, of_rows, lse)
    wrong = ~(_fits(q_offsets, len(q)) & _fits(k_offsets, len(k)))
    return _ungroup_heads(output, q).masked_fill(wrong, torch.nan), lse


def _sees(ahead: torch.Tensor, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    """Return whether a query sees a key that lies this far ahead of its own place."""
    left, right = window[0], 0 if causal else window[1]
    visible = ahead >= -left if left >= 0 else torch.ones_like(ahead, dtype=torch.bool)
    return visible & (ahead <= right) if right >= 0 else visible


def _attend_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    ahead: torch.Tensor,
    visible: torch.Tensor,
    factor: float,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return attention of ``q[kv_heads, group * total_q, head_size]``; `ahead` and `visible` are [total_q, total_k]."""
    group = q.shape[1] // max(len(visible), 1)
    hidden = ~visible.repeat(group, 1)
    scores = q @ k.transpose(1, 2) * factor
    scores = scores if slopes is None else scores - slopes * ahead.abs().repeat(group, 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1) if with_lse else None
    # Of a query without keys the softmax is NaN.
    return scores.softmax(-1).masked_fill(hidden, 0) @ v, lse


def _group_heads(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return ``[total_q, heads, head_size]`` as ``[kv_heads, group * total_q, head_size]``."""
    total, heads, columns = q.shape
    group = heads // kv_heads if kv_heads else 1
    return q.reshape(total, kv_heads, group, columns).permute(1, 2, 0, 3).reshape(kv_heads, group * total, columns)


def _ungroup_heads(grouped: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the reverse of `_group_heads`, in the dtype of q, without gaps."""
    total, heads, columns = q.shape
    kv_heads = len(grouped)
    group = heads // kv_heads if kv_heads else 1
    ordered = grouped.reshape(kv_heads, group, total, columns).permute(2, 0, 1, 3)
    return ordered.reshape(total, heads, columns).to(q.dtype).contiguous()


def _fits(offsets: torch.Tensor, total: int) -> torch.Tensor:
    """Return whether offsets rise from 0 to total."""
    return (offsets[0] == 0) & (offsets[-1] == total) & (offsets.diff() >= 0).all()
