"""giou_loss_ragged in torch operations, without a loop over samples and without waiting for the device."""

from collections.abc import Callable

import torch

from ..giou.arguments import check_giou_loss_ragged
from ..giou.torch_eager import in_compute_dtype, pairwise_giou


def giou_loss_ragged(
    pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """Return the mean of ``1 - giou`` over a ragged batch. Sample i compares ``pred[i, :n_i]`` with n_i target boxes.

    Args:
        pred: ``[batch, max_boxes, 4]``; float16, bfloat16, float32 or float64, any strides.
        target: ``[total, 4]`` of the same dtype and device: the boxes of all samples, one sample after another. Every
            box counts.
        offsets: int32 or int64 ``[batch + 1]``, rising from 0 to total. Sample i has the boxes from ``offsets[i]`` to
            before ``offsets[i + 1]``, at most max_boxes of them.
        eps: least area of the union and of the enclosing box.

    Returns:
        A scalar of the same dtype, 0 if total is 0. It is NaN for invalid offsets on a GPU, since checking them would
        mean waiting for the device.

    Raises:
        TypeError: pred or target is not a floating-point tensor, their dtypes differ, or offsets is not int32 or int64.
        ValueError: shapes or devices do not fit, offsets on the CPU are invalid, or eps is not positive and finite.
    """
    check_giou_loss_ragged(pred, target, offsets, eps)
    return ragged_loss(pred, target, offsets, eps)


def ragged_loss(
    pred: torch.Tensor,
    target: torch.Tensor,
    offsets: torch.Tensor,
    eps: float,
    pairwise: Callable[..., torch.Tensor] = pairwise_giou,
) -> torch.Tensor:
    """Return the mean of ``1 - pairwise(boxes, target, eps)``, for arguments that are checked."""
    total, max_boxes = target.shape[0], pred.shape[1]
    if total == 0:
        # A zero that depends on the inputs, so that backward gives zeros.
        return pred[:0].sum() + target.sum()
    counts = offsets.diff()
    fits = (offsets[0] == 0) & (offsets[-1] == total) & ((counts >= 0) & (counts <= max_boxes)).all()
    row = torch.arange(total, device=target.device)
    sample = (torch.searchsorted(offsets.contiguous(), row.to(offsets.dtype), right=True) - 1).clamp(0, len(pred) - 1)
    boxes = pred[sample, (row - offsets[sample]).clamp(0, max_boxes - 1)]
    loss = 1 - pairwise(in_compute_dtype(boxes), in_compute_dtype(target), eps)
    return (torch.where(fits, loss, torch.nan).sum() / total).to(pred.dtype)
