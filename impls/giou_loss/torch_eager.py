"""giou_loss in torch operations, and the articles' first three versions of a loss over a varying number of boxes."""

from collections.abc import Callable, Sequence

import torch

from ..giou.arguments import check_giou_loss
from ..giou.torch_eager import in_compute_dtype, pairwise_giou


def giou_loss(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return the mean of ``1 - giou`` over the valid rows of a padded batch, or 0 if there are none.

    A row is valid if ``target[..., 3] > 0``.

    Args:
        pred: ``[batch, max_boxes, 4]`` as ``(x1, y1, x2, y2)``; float16, bfloat16, float32 or float64, any strides.
        target: the same shape, dtype and device.
        eps: least area of the union and of the enclosing box.

    Returns:
        A scalar of the same dtype. Padding rows add nothing and get gradient 0, whatever values pred has there.

    Raises:
        TypeError: an argument is not a floating-point tensor, or the dtypes differ.
        ValueError: shapes or devices do not fit, or eps is not positive and finite.

    Source: the padded loss of Accelerating AI/ML Model Training with Custom Operators (2024), plus the clamp of the
    intersection's sides, which the article leaves out.
    """
    check_giou_loss(pred, target, eps)
    return padded_loss(in_compute_dtype(pred), in_compute_dtype(target), eps).to(pred.dtype)


def padded_loss(
    pred: torch.Tensor,
    target: torch.Tensor,
    eps: float = 1e-5,
    pairwise: Callable[..., torch.Tensor] = pairwise_giou,
) -> torch.Tensor:
    """Compute all rows at once, with the padding masked: the third version. ``[batch, max_boxes, 4]`` to a scalar."""
    valid = target[..., 3] > 0
    # Replace padding before the arithmetic. Masking it afterwards would be too late: the gradient of a masked NaN is
    # NaN.
    pred = torch.where(valid[..., None], pred, 0)
    target = torch.where(valid[..., None], target, 0)
    loss = torch.where(valid, 1 - pairwise(pred, target, eps), 0)
    return loss.sum() / valid.sum().clamp(min=1)


def looped_loss(pred: torch.Tensor, targets: Sequence[torch.Tensor], eps: float = 1e-5) -> torch.Tensor:
    """Loop over images: the first version. ``pred[batch, max_boxes, 4]``, a list of ``[n_i, 4]`` to a scalar."""
    total = pred.new_zeros(())
    count = 0
    for sample, target in zip(pred, targets, strict=True):
        if target.shape[0]:
            total = total + (1 - pairwise_giou(sample[: target.shape[0]], target, eps)).sum()
            count += target.shape[0]
    return total / max(count, 1)


def concatenated_loss(pred: torch.Tensor, targets: Sequence[torch.Tensor], eps: float = 1e-5) -> torch.Tensor:
    """Concatenate the images' boxes, then call once: the second version. Arguments are those of `looped_loss`."""
    if not targets:
        return pred.new_zeros(())
    boxes = torch.cat([sample[: target.shape[0]] for sample, target in zip(pred, targets, strict=True)])
    return (1 - pairwise_giou(boxes, torch.cat(list(targets)), eps)).sum() / max(boxes.shape[0], 1)
