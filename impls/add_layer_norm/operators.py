"""The operators of add_layer_norm, which Triton and CUDA C++ share except for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.signature import signature_of

from ..add_rms_norm.operators import backward_of_sum
from ..layer_norm.operators import empty_results
from ..rms_norm.operators import forward_of
from .torch_eager import add_layer_norm as definition


def empty(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    """Return y, h, mean and reciprocal deviation: contiguous and unwritten."""
    y, *statistics = empty_results(x, weight, bias, eps)
    return y, torch.empty_like(y), *statistics


SIGNATURE = signature_of(definition)
ADD_LAYER_NORM = SIGNATURE.operator(
    empty,
    "(Tensor y, Tensor h, Tensor mean, Tensor rstd)",
    saves=("h", "weight", "mean", "rstd"),
    gradients={"x residual": "h", "weight": "weight", "bias": "weight"},
    cotangents=("y", "h"),
    repeats=True,
    public=slice(2),
)


def register(backend: str, forward: Callable[..., None], backward: Callable[..., None]) -> Callable[..., Any]:
    """Register ``add_layer_norm_<backend>`` with its gradient.

    Args:
        backend: part of the operators' names.
        forward: ``(y, h, mean, rstd, x, residual, weight, bias, eps)`` writes y and h ``[..., cols]``, mean and rstd
            ``[rows]``, all contiguous. It is not called for an empty x.
        backward: ``(grad_sum, grad_weight, grad_bias, grad_y, h, weight, mean, rstd, added)``: see `backward_of_sum`.
    """
    run_backward = backward_of_sum(ADD_LAYER_NORM, backward)
    operator = ADD_LAYER_NORM.register(backend, forward_of(ADD_LAYER_NORM, forward), run_backward)
    return SIGNATURE.checked(operator)
