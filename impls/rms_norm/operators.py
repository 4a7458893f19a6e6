"""The operators of rms_norm, which Triton and CUDA C++ share except for the launches; and those of norms like it."""

import math
from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.operators import Operator
from fourfold.backends.signature import signature_of

from .torch_eager import rms_norm as definition


def empty_results(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the reciprocal root of each row in the compute dtype: contiguous and unwritten."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    rstd = torch.empty(math.prod(x.shape[:-1]), dtype=compute, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), rstd


SIGNATURE = signature_of(definition)
RMS_NORM = SIGNATURE.operator(
    empty_results, "(Tensor output, Tensor rstd)", saves=("x", "weight", "rstd"), repeats=True, public=0
)


def zero_all(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Write 0 into tensors, and return them."""
    return tuple(tensor.zero_() for tensor in tensors)


def forward_of(operator: Operator, write: Callable[..., None]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return an operator's forward pass: `write` takes empty results and the arguments; of an empty x they are 0."""

    def run_forward(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        results = operator.fake(x, *rest)
        if not x.numel():
            return zero_all(results)
        write(*results, x, *rest)
        return results

    return run_forward


def backward_of(operator: Operator, write: Callable[..., None]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return an operator's backward pass; of an empty x all gradients are 0.

    Args:
        operator: x is the first tensor that it saves.
        write: ``(gradients, needs, grad_output, *saved)`` writes the gradients that are needed.
    """

    def run_backward(grad_output: torch.Tensor, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        gradients = operator.empty_gradients(grad_output, x, *rest)
        if not x.numel():
            return zero_all(gradients)
        write(gradients, rest[-len(gradients) :], grad_output, x, *rest[: -len(gradients)])
        return gradients

    return run_backward


def register_rms_norm(backend: str, forward: Callable[..., None], backward: Callable[..., None]) -> Callable[..., Any]:
    """Register ``rms_norm_<backend>`` with its gradient.

    Args:
        backend: part of the operator's name.
        forward: ``(output, rstd, x, weight, eps)`` writes output ``[..., cols]`` and rstd ``[rows]``.
        backward: ``(grad_x, grad_weight, grad_output, x, weight, rstd)`` writes the first two; one that is not needed
            is None. Neither function is called for an empty x.
    """

    def write(gradients: tuple[torch.Tensor, ...], needs: tuple[bool, ...], *rest: Any) -> None:
        backward(*(gradient if needed else None for gradient, needed in zip(gradients, needs)), *rest)

    operator = RMS_NORM.register(backend, forward_of(RMS_NORM, forward), backward_of(RMS_NORM, write))
    return SIGNATURE.checked(operator)
