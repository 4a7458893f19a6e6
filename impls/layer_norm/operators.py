"""The operators of layer_norm, which Triton and CUDA C++ share except for the launches."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fourfold.backends.operators import Operator, empty_gradients


class Needs(NamedTuple):
    """Which gradients are needed."""

    x: bool
    weight: bool
    bias: bool

    @property
    def parameters(self) -> bool:
        """Whether the gradient of weight or bias is needed."""
        return self.weight or self.bias


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of mean and rstd, which forward keeps for backward. It is the compute dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_results(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, mean and reciprocal deviation: contiguous and unwritten."""
    rows, dtype = math.prod(x.shape[:-1]), statistics_dtype(x.dtype)
    mean, rstd = (torch.empty(rows, dtype=dtype, device=x.device) for _ in range(2))
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), mean, rstd


LAYER_NORM = Operator(
    schema="layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor output, Tensor mean, Tensor rstd)",
    fake=empty_results,
    saves=("x", "weight", "mean", "rstd"),
    gradients={"x": "x", "weight": "weight", "bias": "weight"},
    repeats=True,
)


def register_layer_norm(backend: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``layer_norm_<backend>`` with its gradient.

    Args:
        backend: part of the operator's name.
        forward: ``(output, mean, rstd, x, weight, bias, eps)`` writes output ``[..., cols]``, mean ``[rows]`` and rstd
            ``[rows]``, all contiguous.
        backward: ``(grad_x, grad_weight, grad_bias, needs, grad_output, x, weight, mean, rstd)`` writes those of the
            first three that are needed, contiguous. Neither function is called for an empty x.
    """

    def run_forward(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        output, mean, rstd = empty_results(x, weight, bias, eps)
        if x.numel():
            forward(output, mean, rstd, x, weight, bias, eps)
        else:
            mean.zero_()
            rstd.zero_()
        return output, mean, rstd

    def run_backward(
        grad_output: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        *needs: bool,
    ) -> tuple[torch.Tensor, ...]:
        gradients = empty_gradients((x, weight, weight), needs)
        if x.numel():
            backward(*gradients, Needs(*needs), grad_output, x, weight, mean, rstd)
        else:
            for gradient in gradients:
                gradient.zero_()
        return gradients

    return LAYER_NORM.register(backend, run_forward, run_backward)
