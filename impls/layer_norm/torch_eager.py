"""layer_norm in torch operations: the baseline, which also defines the results for special values.

torch.nn.functional.layer_norm does not serve: on the CPU it computes x * rstd - mean * rstd. For one column of 1000 its
result is off from the bias by up to 0.01, and any row whose deviation is small against its mean may fare likewise.
"""

import torch

from fourfold.backends.signature import positive, signature, tensor

from ..rms_norm.torch_eager import PARAMETER_KINDS, ROW_KINDS


@signature(
    x=tensor("... cols", kind=ROW_KINDS),
    weight=tensor("cols", kind=PARAMETER_KINDS, special=False),
    bias=tensor("cols", kind=PARAMETER_KINDS),
    eps=positive(1e-5, 1e-12, 1e-3, 0.25),
)
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, with the mean and variance of the last axis.

    Args:
        x: ``[..., cols]``; float16, bfloat16, float32 or float64, any strides, any number of rows and columns.
        weight: ``[cols]``, with the dtype and device of x.
        bias: ``[cols]``, with the dtype and device of x.
        eps: added to the variance, in the units of the variance.

    Returns:
        ``[..., cols]`` of the same dtype. Half types are computed in float32. The variance is the mean of the squared
        deviations, even of one column. A row that holds NaN or an infinity is NaN throughout, and so is the gradient of
        weight. If a row's sum or sum of squared deviations overflows the compute dtype, that row and the gradient of
        weight are unspecified, as in torch. Other rows are not affected. If a row of the cotangent times weight holds
        an infinity, the infinities in that row's gradient are unspecified. Without rows, weight and bias get gradient
        0.

    Raises:
        TypeError: an argument is not a tensor, x is not floating-point, or the dtypes differ.
        ValueError: x has no axis, weight or bias is not ``[cols]``, devices differ, or eps is not positive and finite.

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016.
    """
    # Convert each tensor only once. If one were converted twice, its gradient would be the sum of two rounded ones.
    wide_x, wide_weight, wide_bias = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, weight, bias))
    centred = wide_x - wide_x.mean(-1, keepdim=True)
    deviation = ((centred * centred).mean(-1, keepdim=True) + eps).sqrt()
    return (centred / deviation * wide_weight + wide_bias).to(x.dtype)
