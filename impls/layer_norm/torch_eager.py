"""layer_norm in torch operations: the baseline, and the meaning of special values.

Not torch.nn.functional.layer_norm, which on the CPU takes mean * rstd off x * rstd: of one column of 1000 it makes the
bias give or take 0.01, and so it may end for any row whose deviation is small against its mean.
"""

import torch

from impls.layer_norm.arguments import check_layer_norm


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, mean and variance over the last axis.

    Args:
        x: ``[..., cols]``; float16, bfloat16, float32 or float64, any strides, any number of rows and columns.
        weight: ``[cols]``, of the dtype and device of x.
        bias: ``[cols]``, of the dtype and device of x.
        eps: added to the variance, in its units.

    Returns:
        ``[..., cols]`` of the same dtype; half types are computed in float32. The variance is the mean of the squared
        deviations, be there one column. A row that holds NaN or an infinity is NaN throughout, and with it the gradient
        of weight. In a row whose sum, or sum of squared deviations, overflows the type that is computed in, anything
        may come out, as in torch, and in the gradient of weight; other rows do not notice. Without rows the gradients
        of weight and bias are 0.

    Raises:
        TypeError: a tensor is none, x is not of floating-point numbers, or the dtypes differ.
        ValueError: x has no axis, weight or bias is not ``[cols]``, devices differ, or eps is not positive.

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016.
    """
    check_layer_norm(x, weight, bias, eps)
    # All at once: where a tensor is converted twice, its gradient is the sum of two that have been rounded.
    wide_x, wide_weight, wide_bias = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, weight, bias))
    centred = wide_x - wide_x.mean(-1, keepdim=True)
    deviation = ((centred * centred).mean(-1, keepdim=True) + eps).sqrt()
    return (centred / deviation * wide_weight + wide_bias).to(x.dtype)
