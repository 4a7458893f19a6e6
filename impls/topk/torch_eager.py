"""topk in torch operations: the baseline."""

import torch

from .arguments import check_topk


def topk(x: torch.Tensor, k: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest, or smallest, numbers along the last axis, and where they are.

    Args:
        x: ``[..., n]``; float16, bfloat16, float32 or float64, any strides.
        k: from 0 to n.
        largest: whether to return the largest numbers instead of the smallest.

    Returns:
        values: ``[..., k]`` of the same dtype, from the largest to the smallest, or from the smallest to the largest;
            NaN is above all numbers, as torch has it. Their gradients go to the places that were chosen.
        indices: int64 ``[..., k]``, their places, no two alike. The choice among equal numbers, and their order, are
            unspecified; the kernels take the lower place first, and -0 and 0 as equal.

    Raises:
        TypeError: x is no floating-point tensor, k no integer, or largest no bool.
        ValueError: x has no last axis, or k is below 0 or above n.

    Source: torch.topk.
    """
    check_topk(x, k, largest)
    values, indices = torch.topk(x, k, dim=-1, largest=largest, sorted=True)
    return values, indices
