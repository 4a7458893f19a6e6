"""swiglu in torch operations: the baseline."""

import torch

from fourfold.backends.signature import signature, tensor


@signature(gate=tensor("..."), up=tensor("..."))
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, elementwise, where silu(x) is x / (1 + exp(-x)). Nothing is broadcast.

    Returns a tensor of the same dtype, rounded once; half types are computed in float32. It is NaN where gate is -inf.
    Source: N. Shazeer, GLU Variants Improve Transformer, 2020.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)
