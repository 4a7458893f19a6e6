"""The operators of layer_norm: the same on Triton and CUDA C++ but for the launches."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from impls import operators


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weight: bool
    bias: bool

    @property
    def parameters(self) -> bool:
        """Whether that of weight or bias is."""
        return self.weight or self.bias


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which mean and reciprocal deviation are kept for backward: the one that is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def define_layer_norm(backend: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``layer_norm_<backend>`` with its gradient.

    Args:
        backend: part of the operator's name.
        forward: ``(output, mean, rstd, x, weight, bias, eps)`` writes the first three, ``[..., cols]`` and ``[rows]``
            twice, contiguous.
        backward: ``(grad_x, grad_weight, grad_bias, needs, grad_output, x, weight, mean, rstd)`` writes those of the
            first three that are needed, contiguous. Neither is called where there is no element.
    """

    def results(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = math.prod(x.shape[:-1])
        statistics = [torch.empty(rows, dtype=statistics_dtype(x.dtype), device=x.device) for _ in range(2)]
        return torch.empty(x.shape, dtype=x.dtype, device=x.device), statistics[0], statistics[1]

    def run_forward(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        output, mean, rstd = results(x, weight, bias, eps)
        if x.numel():
            forward(output, mean, rstd, x, weight, bias, eps)
        else:
            mean.zero_()
            rstd.zero_()
        return output, mean, rstd

    def gradient_buffers(
        grad_output: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        needs_x: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[torch.Tensor, ...]:
        wanted = ((needs_x, x), (needs_weight, weight), (needs_bias, weight))
        return tuple(
            torch.empty(like.shape if needed else (0,), dtype=like.dtype, device=like.device) for needed, like in wanted
        )

    def run_backward(
        grad_output: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        needs_x: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[torch.Tensor, ...]:
        needs = Needs(needs_x, needs_weight, needs_bias)
        gradients = gradient_buffers(grad_output, x, weight, mean, rstd, *needs)
        if x.numel():
            backward(*gradients, needs, grad_output, x, weight, mean, rstd)
        else:
            for gradient in gradients:
                gradient.zero_()
        return gradients

    forward_operator = operators.define(
        f"layer_norm_{backend}(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
        run_forward,
        results,
    )
    backward_operator = operators.define(
        f"layer_norm_{backend}_backward(Tensor grad_output, Tensor x, Tensor weight, Tensor mean, Tensor rstd,"
        " bool needs_x, bool needs_weight, bool needs_bias) -> (Tensor, Tensor, Tensor)",
        run_backward,
        gradient_buffers,
    )

    def save(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        x, weight, _, _ = inputs
        _, mean, rstd = output
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)

    def differentiate(ctx: Any, grad_output: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[:3]
        gradients = backward_operator(grad_output, *ctx.saved_tensors, *needed)
        return (*(gradient if needs else None for gradient, needs in zip(gradients, needed)), None)

    operators.differentiate(forward_operator, differentiate, save)
    operators.not_differentiable_twice(backward_operator)
    return forward_operator
