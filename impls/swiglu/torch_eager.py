"""swiglu in torch operations: the baseline."""

import torch

from .arguments import check_swiglu


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, elementwise, where silu(x) is x / (1 + exp(-x)).

    Args:
        gate: ``[...]``; float16, bfloat16, float32 or float64, any strides.
        up: the same shape, dtype and device. Nothing is broadcast.

    Returns:
        ``[...]`` of the same dtype, rounded once; half types are computed in float32. It is NaN where gate is -inf.

    Raises:
        TypeError: gate or up is not a floating-point tensor, or the dtypes differ.
        ValueError: shapes or devices differ.

    Source: N. Shazeer, GLU Variants Improve Transformer, 2020.
    """
    check_swiglu(gate, up)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)
