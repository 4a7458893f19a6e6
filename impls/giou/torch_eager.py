"""giou in torch operations: the baseline that people know, and the meaning of ties and special values."""

import torch

from impls.giou.arguments import check_giou


def pairwise_giou(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
    """`giou` without the checks, in the dtype of the boxes: ``[..., 4]`` twice to ``[...]``."""
    left1, top1, right1, bottom1 = boxes1.unbind(-1)
    left2, top2, right2, bottom2 = boxes2.unbind(-1)

    width = (torch.minimum(right1, right2) - torch.maximum(left1, left2)).clamp(min=0)
    height = (torch.minimum(bottom1, bottom2) - torch.maximum(top1, top2)).clamp(min=0)
    intersection = width * height
    area1 = (right1 - left1) * (bottom1 - top1)
    area2 = (right2 - left2) * (bottom2 - top2)
    union = (area1 + area2 - intersection).clamp(min=eps)

    hull_width = torch.maximum(right1, right2) - torch.minimum(left1, left2)
    hull_height = torch.maximum(bottom1, bottom2) - torch.minimum(top1, top2)
    hull = (hull_width * hull_height).clamp(min=eps)
    return intersection / union - (hull - union) / hull


def in_compute_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Half types as float32, in which they are computed; others as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def giou(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Generalized IoU of paired boxes: I / U - (C - U) / C.

    I is the intersection, with sides clamped at 0; U the union and C the smallest enclosing box, both clamped at eps.

    Args:
        boxes1: ``[..., 4]`` as ``(x1, y1, x2, y2)``; float16, bfloat16, float32 or float64, any strides.
        boxes2: the same shape, dtype and device.
        eps: least area of union and enclosing box.

    Returns:
        ``[...]`` of the same dtype; half types are computed in float32. In [-1, 1] where no box is inverted. Where two
        coordinates are equal each gets half of the gradient; a clamp passes it on where its operand is at or above the
        bound. NaN and infinity go where the formula takes them.

    Raises:
        TypeError: boxes are no floating-point tensors of one dtype.
        ValueError: shapes or devices do not fit, or eps is not positive.

    Source: Rezatofighi et al., Generalized Intersection over Union, CVPR 2019.
    """
    check_giou(boxes1, boxes2, eps)
    return pairwise_giou(in_compute_dtype(boxes1), in_compute_dtype(boxes2), eps).to(boxes1.dtype)
