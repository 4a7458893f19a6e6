"""layer_norm in CUDA C++: the kernels of norm_rows.cuh with a mean."""

import torch

from ..norm_rows import Norm
from .operators import Needs, register_layer_norm

NORM = Norm(__file__, mean=True)
KERNELS = tuple(NORM.kernels.values())


def _backward(
    grad_x: torch.Tensor, grad_weight: torch.Tensor, grad_bias: torch.Tensor, needs: Needs, *rest: torch.Tensor
) -> None:
    gradients = (grad_x, grad_weight, grad_bias)
    NORM.backward(*(gradient if needed else None for gradient, needed in zip(gradients, needs)), *rest)


layer_norm = register_layer_norm("cuda", NORM.forward, _backward)
