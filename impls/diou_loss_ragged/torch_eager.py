"""diou_loss_ragged in torch operations: the baseline."""

import torch

from ..diou_loss.torch_eager import pairwise_diou
from ..giou.arguments import check_giou_loss_ragged
from ..giou_loss_ragged.torch_eager import ragged_loss


def diou_loss_ragged(
    pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """Return the mean of ``1 - DIoU`` over a ragged batch: see `fourfold.impls.diou_loss.torch_eager.diou_loss`.

    Args:
        pred: ``[batch, max_boxes, 4]``; float16, bfloat16, float32 or float64, any strides.
        target: ``[total, 4]`` of the same dtype and device: the boxes of all samples, one sample after another.
        offsets: int32 or int64 ``[batch + 1]``, as `fourfold.impls.giou_loss_ragged.torch_eager.giou_loss_ragged`
            takes them.
        eps: least divisor.

    Returns:
        A scalar of the same dtype, 0 if total is 0. It is NaN for invalid offsets on a GPU.

    Raises:
        TypeError: pred or target is not a floating-point tensor, their dtypes differ, or offsets is not int32 or int64.
        ValueError: shapes or devices do not fit, offsets on the CPU are invalid, or eps is not positive and finite.
    """
    check_giou_loss_ragged(pred, target, offsets, eps)
    return ragged_loss(pred, target, offsets, eps, pairwise_diou)
