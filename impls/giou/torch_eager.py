"""giou in torch operations: the baseline, which also defines the results for ties and special values."""

import torch

from .arguments import check_giou


def clamped(x: torch.Tensor, least: float) -> torch.Tensor:
    """Return max(x, least). The gradient passes where x is at or above `least`.

    The gradient of `Tensor.clamp` at the limit depends on torch's version: it is 1 until 2.14, and 0 from 2.15 on.
    """
    return torch.where(x >= least, x, x.detach().clamp(min=least))


def pairwise_giou(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float, enclosed: bool = True) -> torch.Tensor:
    """Return `giou` without checks, in the boxes' dtype: two ``[..., 4]`` to ``[...]``; I / U unless `enclosed`."""
    left1, top1, right1, bottom1 = boxes1.unbind(-1)
    left2, top2, right2, bottom2 = boxes2.unbind(-1)

    width = clamped(torch.minimum(right1, right2) - torch.maximum(left1, left2), 0)
    height = clamped(torch.minimum(bottom1, bottom2) - torch.maximum(top1, top2), 0)
    intersection = width * height
    area1 = (right1 - left1) * (bottom1 - top1)
    area2 = (right2 - left2) * (bottom2 - top2)
    union = clamped(area1 + area2 - intersection, eps)
    if not enclosed:
        return intersection / union

    hull_width = torch.maximum(right1, right2) - torch.minimum(left1, left2)
    hull_height = torch.maximum(bottom1, bottom2) - torch.minimum(top1, top2)
    hull = clamped(hull_width * hull_height, eps)
    return intersection / union - (hull - union) / hull


def in_compute_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Convert half types to float32, their compute dtype. Return other tensors as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def giou(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return the generalized IoU of paired boxes: I / U - (C - U) / C.

    I is the intersection, with sides clamped at 0. U is the union, C the smallest enclosing box, both clamped at eps.

    Args:
        boxes1: ``[..., 4]`` as ``(x1, y1, x2, y2)``; float16, bfloat16, float32 or float64, any strides.
        boxes2: the same shape, dtype and device.
        eps: least area of the union and of the enclosing box.

    Returns:
        ``[...]`` of the same dtype. Half types are computed in float32. It is in [-1, 1] if no box is inverted. If two
        coordinates are equal, each gets half of the gradient. A clamp passes the gradient if its operand is at or above
        the bound. NaN and infinity propagate as the formula takes them.

    Raises:
        TypeError: an argument is not a floating-point tensor, or the dtypes differ.
        ValueError: shapes or devices differ, the last axis is not 4, or eps is not positive and finite.

    Source: Rezatofighi et al., Generalized Intersection over Union, CVPR 2019.
    """
    check_giou(boxes1, boxes2, eps)
    return pairwise_giou(in_compute_dtype(boxes1), in_compute_dtype(boxes2), eps).to(boxes1.dtype)
