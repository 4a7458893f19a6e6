"""rope in torch operations: the baseline."""

import torch

from .arguments import check_rope


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """Apply rotary position embedding: turn each pair of x by the angle that belongs to its token's position.

    A pair (a, b) with the numbers c and s of cos and sin becomes (a c - b s, b c + a s). What is past the ``2 half``
    elements that have a partner is copied.

    Args:
        x: ``[..., seq, heads, dim]``; float16, bfloat16, float32 or float64, any strides.
        cos: ``[positions, half]`` of the same dtype and device; half is at most dim / 2.
        sin: like cos. Neither of them has a gradient.
        positions: int64 ``[..., seq]``, the row of cos and sin of each token; by default 0, 1, 2 and so on. Nothing is
            broadcast: positions of one sample are expanded to all.
        interleaved: whether pairs are neighbours, as in GPT-J, or half apart, as in GPT-NeoX and Llama.

    Returns:
        The shape and dtype of x, rounded once; half types are computed in float32. A token whose position is out of
        range is NaN, on a GPU.

    Raises:
        TypeError: a tensor is none, a dtype is wrong, or interleaved is no bool.
        ValueError: shapes or devices do not fit, or, on the CPU, a position has no row of cos.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    check_rope(x, cos, sin, positions, interleaved)
    wide, (count, half) = torch.promote_types(x.dtype, torch.float32), cos.shape
    at = torch.arange(x.shape[-3], device=x.device) if positions is None else positions
    c, s = (table.detach().to(wide)[at.clamp(0, count - 1)].unsqueeze(-2) for table in (cos, sin))
    pairs = x[..., : 2 * half].to(wide).unflatten(-1, (half, 2) if interleaved else (2, half))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack((first * c - second * s, second * c + first * s), -1 if interleaved else -2)
    output = torch.cat((turned.flatten(-2).to(x.dtype), x[..., 2 * half :]), -1)
    return output.masked_fill(((at < 0) | (at >= count))[..., None, None], torch.nan)
