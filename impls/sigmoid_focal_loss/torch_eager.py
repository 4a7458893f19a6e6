"""sigmoid_focal_loss in torch operations: the baseline.

torchvision.ops.sigmoid_focal_loss does not serve: it takes a small probability p as 1 - (1 - p), without its digits.
"""

import torch

from .arguments import check_sigmoid_focal_loss

# The exponential of the negative is 0 in every dtype. No gradient flows past it, which an infinite one would make NaN.
FAR = 1e4


def sigmoid_focal_loss(
    logits: torch.Tensor, targets: torch.Tensor, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "none"
) -> torch.Tensor:
    """Return w q^gamma (t softplus(-x) + (1 - t) softplus(x)), where q = t sigmoid(-x) + (1 - t) sigmoid(x).

    It is the cross entropy of sigmoid(x) and t, weighted less where the probability q of a mistake is small.

    Args:
        logits: ``[...]``, x; float16, bfloat16, float32 or float64, any strides.
        targets: ``[...]``, t, of the same shape, dtype and device: 0, 1 or between, as mixed or smoothed labels are.
            Outside of [0, 1] the result is unspecified. It has no gradient.
        alpha: w is ``alpha t + (1 - alpha) (1 - t)``. If it is negative, w is 1.
        gamma: 0 or above; 0 gives the weighted cross entropy.
        reduction: "none" for losses ``[...]``, "sum" for their sum, "mean" for their mean.

    Returns:
        ``[...]`` or a scalar, of the dtype of logits, rounded once. Half types are computed in float32. The mean of no
        losses is NaN, as in torch. A loss is NaN or infinite where the logit is, and its gradient is unspecified there,
        and where the cotangent is infinite, nearly infinite or NaN.

    Raises:
        TypeError: logits is no floating-point tensor, targets has another dtype, or a parameter has another type.
        ValueError: shapes or devices differ, alpha is above 1, gamma below 0, or the reduction is unknown.

    Source: Lin et al., Focal Loss for Dense Object Detection, ICCV 2017; torchvision.ops.sigmoid_focal_loss.
    """
    check_sigmoid_focal_loss(logits, targets, alpha, gamma, reduction)
    wide = torch.promote_types(logits.dtype, torch.float32)
    x, t = logits.to(wide), targets.detach().to(wide)
    # Not abs, whose derivative at 0 is 0.
    positive = x >= 0
    size = torch.where(positive, x, -x)
    power = torch.where(size > FAR, FAR, size).neg().exp()
    against, favoured = torch.where(positive, 1 - t, t), torch.where(positive, t, 1 - t)
    none = against == 0
    log_q = torch.where(none, -size, torch.where(none, 1, against + power * favoured).log()) - power.log1p()
    losses = (gamma * log_q).exp() * (against * size + power.log1p())
    if alpha >= 0:
        losses = losses * (alpha * t + (1 - alpha) * (1 - t))
    return (losses if reduction == "none" else getattr(losses, reduction)()).to(logits.dtype)
