"""The operators of add_layer_norm: the kernels of vector_add and of layer_norm, one after the other."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.signature import signature_of

from ..layer_norm.operators import Needs, empty_results
from ..rms_norm.operators import zero_all
from .torch_eager import add_layer_norm as definition


def empty(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    """Return y, h, mean and reciprocal deviation: contiguous and unwritten."""
    y, *statistics = empty_results(x, weight, bias, eps)
    return y, torch.empty_like(x), *statistics


SIGNATURE = signature_of(definition)
ADD_LAYER_NORM = SIGNATURE.operator(
    empty,
    "(Tensor y, Tensor h, Tensor mean, Tensor rstd)",
    saves=("h", "weight", "mean", "rstd"),
    gradients={"x residual": "h", "weight": "weight", "bias": "weight"},
    cotangents=("y", "h"),
)


def register(
    backend: str, add: Callable[..., torch.Tensor], forward: Callable[..., None], backward: Callable[..., None]
) -> Callable[..., Any]:
    """Register ``add_layer_norm_<backend>`` with its gradient.

    Args:
        backend: part of the operators' names.
        add: the sum of two tensors.
        forward: that of `fourfold.impls.layer_norm.operators.register_layer_norm`.
        backward: likewise.
    """

    def run_forward(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, ...]:
        h = add(x, residual)
        y, mean, rstd = empty_results(h, weight, bias, eps)
        if x.numel():
            forward(y, mean, rstd, h, weight, bias, eps)
        else:
            zero_all((mean, rstd))
        return y, h, mean, rstd

    def run_backward(grad_y: torch.Tensor | None, grad_h: torch.Tensor | None, *rest: Any) -> tuple[torch.Tensor, ...]:
        h, weight, mean, rstd, *needs = rest
        gradients = ADD_LAYER_NORM.empty_gradients(grad_y, grad_h, *rest)
        if grad_y is not None and h.numel():
            backward(*gradients, Needs(*needs), grad_y, h, weight, mean, rstd)
        else:
            zero_all(gradients)
        if grad_h is None or not needs[0]:
            return gradients
        return add(gradients[0], grad_h), *gradients[1:]

    operator = ADD_LAYER_NORM.register(backend, run_forward, run_backward)
    return SIGNATURE.checked(lambda *given: operator(*given)[:2])
