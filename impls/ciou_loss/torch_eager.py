"""ciou_loss in torch operations: the baseline."""

import torch

from ..diou_loss.torch_eager import pairwise_diou
from ..giou.torch_eager import clamped, in_compute_dtype, pairwise_giou
from ..giou_loss.torch_eager import padded, padded_loss


def angle(boxes: torch.Tensor, eps: float) -> torch.Tensor:
    """Return atan(width / height), with the height clamped at eps.

    The quotient is at most 1, so that no step of its gradient overflows, or has few digits because it is subnormal.
    """
    width, height = (boxes[..., 2:] - boxes[..., :2]).unbind(-1)
    height = clamped(height, eps)
    wide = width.abs() > height
    quotient = torch.where(wide, -height, width) / torch.where(wide, width, height)
    return torch.atan(quotient) + torch.where(wide, torch.pi / 2 * width.detach().sign(), 0.0)


def pairwise_ciou(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
    """Return DIoU less alpha v: see `ciou_loss`."""
    v = 4 / torch.pi**2 * (angle(boxes1, eps) - angle(boxes2, eps)).square()
    iou = pairwise_giou(boxes1, boxes2, eps, enclosed=False)
    alpha = (v / (1 - iou + v).clamp(min=eps)).detach()
    return pairwise_diou(boxes1, boxes2, eps) - alpha * v


@padded
def ciou_loss(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return the mean of ``1 - CIoU`` over the rows with ``target[..., 3] > 0`` of a padded batch; 0 without any.

    CIoU = DIoU - alpha v (see `fourfold.impls.diou_loss.torch_eager.diou_loss`), where v is
    4 / pi^2 (atan(w_t / h_t) - atan(w_p / h_p))^2 and alpha = v / (1 - I / U + v), which gradients take as a constant.

    Args:
        pred: ``[batch, max_boxes, 4]`` as ``(x1, y1, x2, y2)``; float16, bfloat16, float32 or float64, any strides.
        target: the same shape, dtype and device.
        eps: least value of U, of c^2, of both heights in v, and of alpha's divisor, so that a box of height 0 has an
            aspect, and alpha is 0 for identical boxes.

    Returns:
        A scalar of the same dtype. Half types are computed in float32. Padding rows add nothing and get gradient 0.
        Equal coordinates share a gradient half and half; a clamp passes it where its operand is at or above eps.

    Raises:
        TypeError: an argument is not a floating-point tensor, or the dtypes differ.
        ValueError: shapes or devices do not fit, or eps is not positive and finite.

    Source: Zheng et al., Distance-IoU Loss, AAAI 2020.
    """
    return padded_loss(in_compute_dtype(pred), in_compute_dtype(target), eps, pairwise_ciou).to(pred.dtype)
