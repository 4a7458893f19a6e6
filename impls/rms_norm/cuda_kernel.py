"""rms_norm in CUDA C++: the kernels of norm_rows.cuh without a mean."""

import torch

from ..norm_rows import Norm
from .operators import register_rms_norm

NORM = Norm(__file__)
KERNELS = tuple(NORM.kernels.values())


def _forward(output: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    NORM.forward(output, None, rstd, x, weight, None, eps)


def _backward(
    grad_x: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
) -> None:
    NORM.backward(grad_x, grad_weight, None, grad_output, x, weight, None, rstd)


rms_norm = register_rms_norm("cuda", _forward, _backward)
