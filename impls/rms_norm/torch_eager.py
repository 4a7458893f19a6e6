"""rms_norm in torch operations: the baseline, which also defines the results for special values."""

import torch

from fourfold.backends.signature import KINDS, positive, signature, tensor

# Kinds of rows. The huge kind is rarer than the others: its squares overflow, and little is known of the result.
ROW_KINDS = (*(kind for kind in KINDS if kind != "huge"), *KINDS)
# Kinds of weight and bias. None is infinite: an infinite weight leaves nothing of a row's gradient to compare.
PARAMETER_KINDS = ("normal", "whole", "constant", "spread")


@signature(
    x=tensor("... cols", kind=ROW_KINDS),
    weight=tensor("cols", kind=PARAMETER_KINDS, special=False),
    eps=positive(1e-6, 1e-12, 1e-3, 0.25),
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, with the mean over the last axis.

    Args:
        x: ``[..., cols]``; float16, bfloat16, float32 or float64, any strides, any number of rows and columns.
        weight: ``[cols]``, with the dtype and device of x.
        eps: added to the mean square, in the units of the square.

    Returns:
        ``[..., cols]`` of the same dtype, rounded once. Half types are computed in float32. A row that holds NaN is NaN
        throughout, and so is the gradient of weight. If a row holds an infinity, or its sum of squares overflows the
        compute dtype, that row and the gradient of weight are unspecified. Other rows are not affected. Without rows,
        weight gets gradient 0.

    Raises:
        TypeError: an argument is not a tensor, x is not floating-point, or the dtypes differ.
        ValueError: x has no axis, weight is not ``[cols]``, devices differ, or eps is not positive and finite.

    Source: Zhang, Sennrich, Root Mean Square Layer Normalization, NeurIPS 2019.
    """
    wide_x, wide_weight = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (x, weight))
    root = ((wide_x * wide_x).mean(-1, keepdim=True) + eps).sqrt()
    return (wide_x / root * wide_weight).to(x.dtype)
