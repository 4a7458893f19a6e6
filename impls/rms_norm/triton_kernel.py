"""rms_norm in Triton: the kernels of layer_norm without a mean and a bias."""

import torch

from ..layer_norm.triton_kernel import launch_backward, launch_forward
from .operators import register_rms_norm


def _forward(output: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    launch_forward(output, None, rstd, x, weight, None, eps)


def _backward(
    grad_x: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
) -> None:
    launch_backward(grad_x, grad_weight, None, grad_output, x, weight, None, rstd)


rms_norm = register_rms_norm("triton", _forward, _backward)
