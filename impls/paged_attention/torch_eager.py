"""paged_attention in torch operations: the baseline. Nothing waits for the device, so all sequences take all pages."""

from typing import Any

import torch

from fourfold.backends.signature import positive, signature, tensor

MOST_COLUMNS = 256  # of a head
MOST_TOKENS = 2**31 - 2**16  # kernels count the tokens of a sequence in 32 bits


def check_sizes(q: Any, k_cache: Any, v_cache: Any, page_table: Any, lengths: Any, scale: Any) -> None:
    """Check the sizes of axes and, on the CPU and outside torch.compile, the lengths and the pages in use.

    Raises:
        ValueError: a size, a length or a page is out of its range.
    """
    heads, columns = q.shape[1:]
    pages, page_size, kv_heads = k_cache.shape[:3]
    if not 1 <= columns <= MOST_COLUMNS:
        raise ValueError(f"q must have a head_size from 1 to {MOST_COLUMNS}, not {columns}")
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"k_cache must have a number of heads that divides the {heads} of q, not {kv_heads}")
    if not page_size:
        raise ValueError("k_cache must have pages of at least one token")
    tokens = page_table.shape[1] * page_size
    if tokens > MOST_TOKENS:
        raise ValueError(f"page_table must hold at most {MOST_TOKENS} tokens of a sequence, not {tokens}")
    if not lengths.is_cpu or torch.compiler.is_compiling() or not lengths.numel():
        return
    least, most = (int(end) for end in lengths.aminmax())
    if least < 0 or most > tokens:
        raise ValueError(f"lengths must be from 0 to the {tokens} tokens of a row of page_table, not {least} to {most}")
    used = page_table[torch.arange(page_table.shape[1]) * page_size < lengths[:, None]]
    if used.numel() and (int(used.min()) < 0 or int(used.max()) >= pages):
        found = f"{int(used.min())} to {int(used.max())}"
        raise ValueError(f"page_table must have pages from 0 to {pages - 1} where they are in use, not {found}")


@signature(
    check_sizes,
    q=tensor("sequences heads head_size"),
    k_cache=tensor("pages page_size kv_heads head_size"),
    v_cache=tensor("pages page_size kv_heads head_size"),
    # Entries that are not in use may be any numbers, and lengths end at the size of a row: see `check_sizes`.
    page_table=tensor("sequences pages_per_sequence", dtype="int32", high="pages", also=(-1,)),
    lengths=tensor("sequences", dtype="int32", high=2**31, also=(-1,)),
    scale=positive(0.25),
)
@torch.no_grad()
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return ``softmax(scale q k^T) v`` of one query for each sequence and head, over the tokens in a paged cache.

    Args:
        q: ``[sequences, heads, head_size]``, the query of each sequence; float16, bfloat16, float32 or float64, any
            strides, head_size from 1 to 256.
        k_cache: ``[pages, page_size, kv_heads, head_size]`` of the same dtype and device; heads is a multiple of
            kv_heads. Head h of q goes with head ``h // (heads / kv_heads)``. Any strides, but a cache is copied unless
            the numbers of a head are neighbours.
        v_cache: like k_cache.
        page_table: int32 ``[sequences, pages_per_sequence]``. Token t of sequence s is at ``t % page_size`` of the page
            ``page_table[s, t // page_size]``. Entries past the last token's may be any numbers.
        lengths: int32 ``[sequences]``, the tokens of each sequence, from 0 to ``pages_per_sequence * page_size``.
        scale: of the scores, positive; mostly ``1 / sqrt(head_size)``.

    Returns:
        ``[sequences, heads, head_size]`` of the same dtype, without a gradient; zeros for a sequence without tokens.
        Half types are computed in float32, but kernels round the weights to the dtype before they multiply. What lies
        in a page past the last token, NaN among it, changes nothing. On a GPU, a length or a page in use that is out
        of its range makes the results of that sequence NaN.

    Raises:
        TypeError: a tensor is none, dtypes differ, page_table or lengths is not int32, or scale is no number.
        ValueError: shapes or devices do not fit, head_size is not from 1 to 256, heads is no multiple of kv_heads,
            scale is not positive and finite, or, on the CPU, a length or a page in use is out of its range.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
    """
    wide, (pages, page_size, kv_heads, columns) = torch.promote_types(q.dtype, torch.float32), k_cache.shape
    tokens, table = torch.arange(page_table.shape[1] * page_size, device=q.device), page_table.long()
    output = q.new_zeros(q.shape)
    if not output.numel():
        return output
    there, known = tokens < lengths[:, None], (table >= 0) & (table < pages)
    fits = (lengths >= 0) & (lengths <= len(tokens)) & (known | ~there[:, ::page_size]).all(-1)
    if pages and len(tokens):
        # Zeros in place of what is not there: NaN times a weight of 0 would be NaN.
        k, v = (x[table.where(known, 0)].flatten(1, 2).to(wide) for x in (k_cache, v_cache))
        k, v = (x.where(there[..., None, None], 0) for x in (k, v))
        scores = q.to(wide).reshape(len(q), kv_heads, -1, columns) @ k.permute(0, 2, 3, 1) * scale
        absent = ~there[:, None, None]
        weights = scores.masked_fill(absent, -torch.inf).softmax(-1).masked_fill(absent, 0)
        output = (weights @ v.transpose(1, 2)).reshape(q.shape).to(q.dtype)
    return output.masked_fill(~fits[:, None, None], torch.nan)
