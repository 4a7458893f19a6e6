"""The operators of rms_norm, which Triton and CUDA C++ share except for the launches."""

import math
from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.operators import Operator, empty_gradients


def empty_results(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the reciprocal root of each row in the compute dtype: contiguous and unwritten."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    rstd = torch.empty(math.prod(x.shape[:-1]), dtype=compute, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), rstd


RMS_NORM = Operator(
    schema="rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor output, Tensor rstd)",
    fake=empty_results,
    saves=("x", "weight", "rstd"),
    gradients={"x": "x", "weight": "weight"},
    repeats=True,
)


def register_rms_norm(backend: str, forward: Callable[..., None], backward: Callable[..., None]) -> Callable[..., Any]:
    """Register ``rms_norm_<backend>`` with its gradient.

    Args:
        backend: part of the operator's name.
        forward: ``(output, rstd, x, weight, eps)`` writes output ``[..., cols]`` and rstd ``[rows]``.
        backward: ``(grad_x, grad_weight, grad_output, x, weight, rstd)`` writes the first two; one that is not needed
            is None. Neither function is called for an empty x.
    """

    def run_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        output, rstd = empty_results(x, weight, eps)
        if x.numel():
            forward(output, rstd, x, weight, eps)
        else:
            rstd.zero_()
        return output, rstd

    def run_backward(
        grad_output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, *needs: bool
    ) -> tuple[torch.Tensor, ...]:
        gradients = empty_gradients((x, weight), needs)
        if x.numel():
            wanted = (gradient if needed else None for gradient, needed in zip(gradients, needs))
            backward(*wanted, grad_output, x, weight, rstd)
        else:
            for gradient in gradients:
                gradient.zero_()
        return gradients

    return RMS_NORM.register(backend, run_forward, run_backward)
