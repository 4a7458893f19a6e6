"""The operators of layer_norm, which Triton and CUDA C++ share except for the launches."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fourfold.backends.signature import signature_of

from ..rms_norm.operators import backward_of, forward_of
from .torch_eager import layer_norm as definition


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


SIGNATURE = signature_of(definition)
LAYER_NORM = SIGNATURE.operator(
    empty_results,
    "(Tensor output, Tensor mean, Tensor rstd)",
    saves=("x", "weight", "mean", "rstd"),
    gradients={"x": "x", "weight": "weight", "bias": "weight"},
    repeats=True,
    public=0,
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

    def write(gradients: tuple[torch.Tensor, ...], needs: tuple[bool, ...], *rest: Any) -> None:
        backward(*gradients, Needs(*needs), *rest)

    operator = LAYER_NORM.register(backend, forward_of(LAYER_NORM, forward), backward_of(LAYER_NORM, write))
    return SIGNATURE.checked(operator)
