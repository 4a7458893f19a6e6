"""giou_loss_ragged in torch operations, without a loop over samples and without a wait for the device."""

import torch

from impls.giou.arguments import check_giou_loss_ragged
from impls.giou.torch_eager import in_compute_dtype, pairwise_giou


def giou_loss_ragged(
    pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """Mean of ``1 - giou`` over a ragged batch: sample i compares ``pred[i, :n_i]`` with its n_i target boxes.

    Args:
        pred: ``[batch, max_boxes, 4]``; float16, bfloat16, float32 or float64, any strides.
        target: ``[total, 4]``, the samples' boxes one after another; of the same dtype and device. Every box counts.
        offsets: int32 or int64 ``[batch + 1]``; sample i has boxes ``offsets[i]`` to ``offsets[i + 1]``, at most
            max_boxes of them. Rising from 0 to total.
        eps: least area of union and enclosing box.

    Returns:
        A scalar of the same dtype; 0 where total is 0. Where offsets on a GPU do not fit, which cannot be known
        without waiting for it, NaN.

    Raises:
        TypeError: pred and target are no floating-point tensors of one dtype, or offsets no integers.
        ValueError: shapes or devices do not fit, offsets on the CPU do not fit, or eps is not positive.
    """
    check_giou_loss_ragged(pred, target, offsets, eps)
    total, max_boxes = target.shape[0], pred.shape[1]
    if total == 0:
        # Zero, and yet connected to the inputs, so that backward gives zeros.
        return pred[:0].sum() + target.sum()
    counts = offsets.diff()
    fits = (offsets[0] == 0) & (offsets[-1] == total) & ((counts >= 0) & (counts <= max_boxes)).all()
    row = torch.arange(total, device=target.device)
    sample = (torch.searchsorted(offsets.contiguous(), row.to(offsets.dtype), right=True) - 1).clamp(0, len(pred) - 1)
    boxes = pred[sample, (row - offsets[sample]).clamp(0, max_boxes - 1)]
    loss = 1 - pairwise_giou(in_compute_dtype(boxes), in_compute_dtype(target), eps)
    return (torch.where(fits, loss, torch.nan).sum() / total).to(pred.dtype)
