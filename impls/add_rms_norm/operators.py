"""The operators of add_rms_norm, which Triton and CUDA C++ share except for the launches; gradients of like norms."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.operators import Operator
from fourfold.backends.signature import signature_of

from ..rms_norm.operators import empty_results, forward_of, zero_all
from .torch_eager import add_rms_norm as definition


def empty(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, residual_out, and the reciprocal root of each row in the compute dtype: contiguous and unwritten."""
    y, rstd = empty_results(x, weight, eps)
    return y, torch.empty_like(y), rstd


SIGNATURE = signature_of(definition)
ADD_RMS_NORM = SIGNATURE.operator(
    empty,
    "(Tensor y, Tensor residual_out, Tensor rstd)",
    saves=("residual_out", "weight", "rstd"),
    gradients={"x residual": "residual_out", "weight": "weight"},
    cotangents=("y", "residual_out"),
    repeats=True,
    public=slice(2),
)


def backward_of_sum(operator: Operator, write: Callable[..., None]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the backward pass of the norm of a sum, which is returned too.

    Args:
        operator: the sum is the first tensor that it saves.
        write: a function of ``(*gradients, grad_y, *saved, added)`` that writes the gradients that are not None.
            `added` is the cotangent of the sum, contiguous, or None: it is 0. It is not called for an empty sum.
    """

    def run_backward(
        grad_y: torch.Tensor | None, grad_sum: torch.Tensor | None, *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        gradients = operator.empty_gradients(grad_y, grad_sum, *rest)
        saved, needs = rest[: -len(gradients)], rest[-len(gradients) :]
        added = None if grad_sum is None or not needs[0] else grad_sum.contiguous()
        if grad_y is not None and saved[0].numel():
            wanted = (gradient if needed else None for gradient, needed in zip(gradients, needs))
            write(*wanted, grad_y, *saved, added)
            return gradients
        zero_all(gradients)
        if added is not None:
            gradients[0].copy_(added)
        return gradients

    return run_backward


def register(backend: str, forward: Callable[..., None], backward: Callable[..., None]) -> Callable[..., Any]:
    """Register ``add_rms_norm_<backend>`` with its gradient.

    Args:
        backend: part of the operators' names.
        forward: ``(y, residual_out, rstd, x, residual, weight, eps)`` writes y and residual_out ``[..., cols]`` and
            rstd ``[rows]``. It is not called for an empty x.
        backward: ``(grad_sum, grad_weight, grad_y, residual_out, weight, rstd, added)``: see `backward_of_sum`.
    """
    run_backward = backward_of_sum(ADD_RMS_NORM, backward)
    operator = ADD_RMS_NORM.register(backend, forward_of(ADD_RMS_NORM, forward), run_backward)
    return SIGNATURE.checked(operator)
