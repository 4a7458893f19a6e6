"""vector_add in torch operations: the baseline."""

import torch

from fourfold.backends.signature import signature, tensor


@signature(x=tensor("..."), y=tensor("..."))
def vector_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x + y, elementwise, rounded once. Nothing is broadcast. The gradients of x and y are both grad_output.

    Source: torch.add.
    """
    return x + y
