"""add_rms_norm in CUDA C++: the kernels of norm_rows.cuh, with a residual that is added forward."""

import torch

from ..norm_rows import Norm
from .operators import register

NORM = Norm(__file__, added=True)
KERNELS = tuple(NORM.kernels.values())


def _forward(
    y: torch.Tensor,
    residual_out: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> None:
    NORM.forward(y, None, rstd, x, weight, None, eps, residual, residual_out)


def _backward(
    grad_sum: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_y: torch.Tensor,
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    added: torch.Tensor | None,
) -> None:
    NORM.backward(grad_sum, grad_weight, None, grad_y, residual_out, weight, None, rstd, added)


add_rms_norm = register("cuda", _forward, _backward)
