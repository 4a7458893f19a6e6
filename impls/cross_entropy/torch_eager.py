"""cross_entropy in torch operations: the baseline, which also defines the results for special values.

torch.nn.functional.cross_entropy does not serve: it rounds the logarithms of half types before it sums them.
"""

import torch

from .arguments import check_cross_entropy


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return -sum(q log(softmax(logits))) of each row, where q is 1 at the target's class, or smoothed.

    Args:
        logits: ``[rows, classes]``, at least one class; float16, bfloat16, float32 or float64, any strides.
        target: ``[rows]`` int32 or int64 on the same device: a class, or `ignore_index`. Any strides.
        ignore_index: what marks a row that is ignored. Such a row is not read.
        label_smoothing: from 0 to 1; q is ``1 - label_smoothing`` at the target, plus ``label_smoothing / classes``
            everywhere.
        reduction: "none" for ``[rows]`` losses, "sum" for their sum, "mean" for their mean over rows that count.

    Returns:
        ``[rows]`` or a scalar, of the dtype of logits, rounded once. Half types are computed in float32. A row that
        holds NaN or +inf, or only -inf, has loss NaN. A row that is ignored has loss 0 and gradient 0. The mean over no
        rows is NaN, as in torch, and its gradient 0. Where the cotangent is not finite, the gradient is unspecified.

    Raises:
        TypeError: logits is no floating-point tensor, target no int32 or int64 one, or a parameter has another type.
        ValueError: a shape is wrong, there are no classes, devices differ, or a value is out of its range.

    Source: Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2015, for the smoothing.
    """
    check_cross_entropy(logits, target, ignore_index, label_smoothing, reduction)
    counted = target != ignore_index
    # Replace rows that are ignored before the arithmetic: the gradient of a masked NaN is NaN.
    rows = torch.where(counted[:, None], logits.to(torch.promote_types(logits.dtype, torch.float32)), 0)
    valid = counted & (target >= 0) & (target < logits.shape[1])
    largest = rows.detach().amax(-1, keepdim=True)
    rows = rows - largest
    expected = rows.gather(1, torch.where(valid, target, 0).long()[:, None])[:, 0]
    if label_smoothing:
        expected = (1 - label_smoothing) * expected + label_smoothing * rows.mean(-1)
    losses = torch.where(counted, rows.exp().sum(-1).log() - expected, 0)
    losses = torch.where(valid | ~counted, losses, torch.nan)
    if reduction == "none":
        return losses.to(logits.dtype)
    return (losses.sum() if reduction == "sum" else losses.sum() / counted.sum()).to(logits.dtype)
