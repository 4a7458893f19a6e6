"""softmax in torch operations: the baseline that people know, and the meaning of special values."""

import torch

from impls.giou.torch_eager import in_compute_dtype
from impls.softmax.arguments import check_softmax


def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(x) / sum(exp(x)) over the last axis, with the row's largest entry taken off x first.

    Args:
        x: ``[..., cols]``; float16, bfloat16, float32 or float64, any strides, any number of rows and columns.

    Returns:
        ``[..., cols]`` of the same dtype, from 0 to 1; half types are computed in float32. A row that holds NaN or
        +inf, or nothing but -inf, is NaN throughout; an entry of -inf beside finite ones gives 0. The gradient is
        ``y (g - sum(g y))``, taken from the output y.

    Raises:
        TypeError: x is no floating-point tensor.
        ValueError: x has no axis.
    """
    check_softmax(x)
    # Left to itself torch rounds the products of gradient and output to half types on a GPU before it sums them.
    return torch.softmax(in_compute_dtype(x), dim=-1).to(x.dtype)
