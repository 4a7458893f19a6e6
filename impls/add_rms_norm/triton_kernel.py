"""add_rms_norm in Triton: the kernels of layer_norm without a mean and a bias, of a sum."""

import torch

from ..layer_norm.triton_kernel import launch_backward, launch_forward
from .operators import register


def _forward(
    y: torch.Tensor,
    residual_out: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> None:
    launch_forward(y, None, rstd, x, weight, None, eps, residual, residual_out)


def _backward(
    grad_sum: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_y: torch.Tensor,
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    added: torch.Tensor | None,
) -> None:
    launch_backward(grad_sum, grad_weight, None, grad_y, residual_out, weight, None, rstd, added)


add_rms_norm = register("triton", _forward, _backward)
