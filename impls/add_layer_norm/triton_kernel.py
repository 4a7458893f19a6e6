"""add_layer_norm in Triton: the kernels of vector_add and of layer_norm."""

import torch

from ..layer_norm.operators import Needs
from ..layer_norm.triton_kernel import _backward as backward_of_norm
from ..layer_norm.triton_kernel import _forward as forward_of_norm
from ..vector_add.triton_kernel import vector_add
from .operators import register


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
    forward_of_norm(y, mean, rstd, h, weight, bias, eps)


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
    given = zip((grad_sum, grad_weight, grad_bias), (h, weight, weight))
    of_x, of_weight, of_bias = (torch.empty_like(like) if gradient is None else gradient for gradient, like in given)
    backward_of_norm(of_x, of_weight, of_bias, needs, grad_y, h, weight, mean, rstd)
    if grad_sum is not None and added is not None:
        grad_sum.copy_(vector_add(grad_sum, added))


add_layer_norm = register("triton", _forward, _backward)
