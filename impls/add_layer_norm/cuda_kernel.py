"""add_layer_norm in CUDA C++: the kernels of vector_add and of layer_norm."""

import torch

from fourfold.backends.signature import signature_of

from ..layer_norm.cuda_kernel import KERNELS as OF_NORM
from ..layer_norm.cuda_kernel import launch_backward, launch_forward
from ..vector_add.cuda_kernel import KERNELS as OF_SUM
from ..vector_add.cuda_kernel import vector_add
from .operators import register
from .torch_eager import add_layer_norm as definition

KERNELS = (*OF_SUM, *OF_NORM)
add_layer_norm_operator = register("cuda", vector_add, launch_forward, launch_backward)


@signature_of(definition).checked
def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return h = x + residual, and its norm: see `fourfold.impls.add_layer_norm.torch_eager.add_layer_norm`."""
    y, h, _, _ = add_layer_norm_operator(x, residual, weight, bias, eps)
    return y, h
