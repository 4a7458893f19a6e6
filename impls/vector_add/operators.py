"""The operator of vector_add: the same on Triton and CUDA C++ but for the launch."""

from collections.abc import Callable
from typing import Any

import torch

from impls import operators


def define_vector_add(backend: str, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Register ``vector_add_<backend>`` with its gradient, which is the cotangent: no launch.

    Args:
        backend: part of the operator's name.
        forward: ``(x, y)`` to ``torch.empty_like(x)``, filled.
    """
    operator = operators.define(
        f"vector_add_{backend}(Tensor x, Tensor y) -> Tensor", forward, lambda x, y: torch.empty_like(x)
    )

    def differentiate(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad_output, grad_output

    operators.differentiate(operator, differentiate, lambda ctx, inputs, output: None)
    return operator
