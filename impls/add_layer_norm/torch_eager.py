"""add_layer_norm in torch operations: the baseline, which also defines the results for special values."""

import torch

from fourfold.backends.signature import positive, signature, tensor

from ..layer_norm.torch_eager import layer_norm
from ..rms_norm.torch_eager import PARAMETER_KINDS, ROW_KINDS


@signature(
    x=tensor("... cols", kind=ROW_KINDS),
    residual=tensor("... cols", kind=ROW_KINDS),
    weight=tensor("cols", kind=PARAMETER_KINDS, special=False),
    bias=tensor("cols", kind=PARAMETER_KINDS),
    eps=positive(1e-5, 1e-12, 1e-3, 0.25),
)
def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return h = x + residual, and y = layer_norm(h, weight, bias, eps).

    Args:
        x: ``[..., cols]``; float16, bfloat16, float32 or float64, any strides, any number of rows and columns.
        residual: ``[..., cols]``, with the shape, dtype and device of x, and any strides.
        weight: ``[cols]``, with the dtype and device of x.
        bias: ``[cols]``, with the dtype and device of x.
        eps: added to the variance, in the units of the variance.

    Returns:
        y: ``[..., cols]`` of the same dtype, rounded once: the norm of h as that is returned, rounded to the dtype.
        h: ``[..., cols]``, rounded once; it shares no memory with x or residual.

        Both have gradients. x and residual get the same one: the cotangent of h plus the gradient through the norm,
        each rounded. An output that is not used adds nothing. Special values are those of `layer_norm` of h.

    Raises:
        TypeError: an argument is not a tensor, x is not floating-point, or the dtypes differ.
        ValueError: x has no axis, residual has another shape, weight or bias is not ``[cols]``, devices differ, or eps
            is not positive and finite.

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016.
    """
    h = x + residual
    return layer_norm(h, weight, bias, eps), h
