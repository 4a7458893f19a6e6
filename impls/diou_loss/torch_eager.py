"""diou_loss in torch operations: the baseline."""

import torch

from ..giou.arguments import check_giou_loss
from ..giou.torch_eager import clamped, in_compute_dtype, pairwise_giou
from ..giou_loss.torch_eager import padded_loss


def pairwise_diou(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
    """Return I / U less the squared distance of the centres over the squared diagonal of the enclosing box."""
    first, second = boxes1.unflatten(-1, (2, 2)), boxes2.unflatten(-1, (2, 2))
    # Of large coordinates, the difference of the corners keeps more digits than that of the centres.
    apart = (first - second).sum(-2) / 2
    lower, _ = torch.minimum(first, second).unbind(-2)
    _, upper = torch.maximum(first, second).unbind(-2)
    diagonal = clamped((upper - lower).square().sum(-1), eps)
    return pairwise_giou(boxes1, boxes2, eps, enclosed=False) - apart.square().sum(-1) / diagonal


def diou_loss(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return the mean of ``1 - DIoU`` over the rows with ``target[..., 3] > 0`` of a padded batch; 0 without any.

    DIoU = I / U - d^2 / c^2, with d the distance of the centres and c the diagonal of the smallest enclosing box.

    Args:
        pred: ``[batch, max_boxes, 4]`` as ``(x1, y1, x2, y2)``; float16, bfloat16, float32 or float64, any strides.
        target: the same shape, dtype and device.
        eps: least value of U and of c^2.

    Returns:
        A scalar of the same dtype. Half types are computed in float32. Padding rows add nothing and get gradient 0.
        Equal coordinates share a gradient half and half; a clamp passes it where its operand is at or above eps.

    Raises:
        TypeError: an argument is not a floating-point tensor, or the dtypes differ.
        ValueError: shapes or devices do not fit, or eps is not positive and finite.

    Source: Zheng et al., Distance-IoU Loss, AAAI 2020.
    """
    check_giou_loss(pred, target, eps)
    return padded_loss(in_compute_dtype(pred), in_compute_dtype(target), eps, pairwise_diou).to(pred.dtype)
