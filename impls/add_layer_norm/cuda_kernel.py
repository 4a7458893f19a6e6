"""add_layer_norm in CUDA C++: the kernels of vector_add and of layer_norm."""

import torch

from ..layer_norm.cuda_kernel import KERNELS as OF_NORM
from ..layer_norm.cuda_kernel import launch_backward, launch_forward
from ..layer_norm.operators import Needs
from ..vector_add.cuda_kernel import KERNELS as OF_SUM
from ..vector_add.cuda_kernel import vector_add
from .operators import register

KERNELS = (*OF_SUM, *OF_NORM)


def _forward(
    y: torch.Tensor,
    h: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> None:
    h.copy_(vector_add(x, residual))
    launch_forward(y, mean, rstd, h, weight, bias, eps)


def _backward(
    grad_sum: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
    grad_y: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    added: torch.Tensor | None,
) -> None:
    needs = Needs(grad_sum is not None, grad_weight is not None, grad_bias is not None)
    of_sum, of_weight, of_bias = h if grad_sum is None else grad_sum, weight, weight
    if grad_weight is not None:
        of_weight = grad_weight
    if grad_bias is not None:
        of_bias = grad_bias
    launch_backward(of_sum, of_weight, of_bias, needs, grad_y, h, weight, mean, rstd)
    if grad_sum is not None and added is not None:
        grad_sum.copy_(vector_add(grad_sum, added))


add_layer_norm = register("cuda", _forward, _backward)
