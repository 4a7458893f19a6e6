"""add_rms_norm in CUDA C++: rms_norm's kernels, with a residual that is added forward and a cotangent backward."""

import torch

from ..rms_norm.cuda_kernel import kernels_of, launch_backward, launch_forward
from .operators import register

OWN = kernels_of("add_rms_norm_forward_kernel", added=True)
# Where residual_out has no cotangent, the gradients are those of rms_norm alone.
OWN_WITHOUT = kernels_of("add_rms_norm_forward_kernel", added=False)
KERNELS = (*OWN.all, *(kernel for kernel in OWN_WITHOUT.all if kernel.name not in {own.name for own in OWN.all}))


def _forward(
    y: torch.Tensor,
    residual_out: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> None:
    launch_forward(y, rstd, x, weight, eps, residual, residual_out, OWN)


def _backward(
    grad_sum: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_y: torch.Tensor,
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    added: torch.Tensor | None,
) -> None:
    kernels = OWN_WITHOUT if added is None else OWN
    launch_backward(grad_sum, grad_weight, grad_y, residual_out, weight, rstd, added, kernels)


add_rms_norm = register("cuda", _forward, _backward)
