"""rms_norm in Triton: the kernels of layer_norm without a mean and a bias."""

from typing import Any

import torch

from ..layer_norm.triton_kernel import launch_backward, launch_forward
from .operators import register_rms_norm


def _forward(output: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    launch_forward(output, None, None, rstd, x, None, weight, None, eps)


def launch_uncentred(grad_x: torch.Tensor | None, grad_weight: torch.Tensor | None, *rest: Any) -> None:
    """Write the gradients that are needed, as `launch_backward` does without a mean and a bias."""
    grad_output, x, weight, rstd, *added = rest
    launch_backward(grad_x, grad_weight, None, grad_output, x, weight, None, rstd, *added)


rms_norm = register_rms_norm("triton", _forward, launch_uncentred)
