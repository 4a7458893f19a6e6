"""add_rms_norm in torch operations: the baseline, which also defines the results for special values."""

import torch

from fourfold.backends.signature import positive, signature, tensor

from ..rms_norm.torch_eager import PARAMETER_KINDS, ROW_KINDS, rms_norm


@signature(
    x=tensor("... cols", kind=ROW_KINDS),
    residual=tensor("... cols", kind=ROW_KINDS),
    weight=tensor("cols", kind=PARAMETER_KINDS, special=False),
    eps=positive(1e-6, 1e-12, 1e-3, 0.25),
)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return residual_out = x + residual, and y = rms_norm(residual_out, weight, eps).

    Args:
        x: ``[..., cols]``; float16, bfloat16, float32 or float64, any strides, any number of rows and columns.
        residual: ``[..., cols]``, with the shape, dtype and device of x, and any strides.
        weight: ``[cols]``, with the dtype and device of x.
        eps: added to the mean square, in the units of the square.

    Returns:
        y: ``[..., cols]`` of the same dtype, rounded once. It is the norm of residual_out as that is returned, rounded
            to the dtype, and so the same as of two calls; kernels of others may take the sum before it is rounded.
        residual_out: ``[..., cols]``, rounded once; it shares no memory with x or residual.

        Both have gradients. x and residual get the same one: the cotangent of residual_out plus the gradient through
        the norm. An output that is not used adds nothing. Special values are those of `rms_norm` of residual_out.

    Raises:
        TypeError: an argument is not a tensor, x is not floating-point, or the dtypes differ.
        ValueError: x has no axis, residual has another shape, weight is not ``[cols]``, devices differ, or eps is not
            positive and finite.

    Source: `fused_add_rms_norm` of vLLM; the norm is that of Zhang, Sennrich, Root Mean Square Layer Normalization,
    NeurIPS 2019.
    """
    residual_out = x + residual
    return rms_norm(residual_out, weight, eps), residual_out
