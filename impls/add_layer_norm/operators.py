"""The operators of add_layer_norm: the kernels of vector_add and of layer_norm, one after the other."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends import operators
from fourfold.backends.operators import empty_gradients

from ..layer_norm.operators import Needs, empty_results


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

    def empty(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        y, mean, rstd = empty_results(x, weight, bias, eps)
        return y, torch.empty_like(x), mean, rstd

    def run_forward(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        h = add(x, residual)
        y, mean, rstd = empty_results(h, weight, bias, eps)
        if x.numel():
            forward(y, mean, rstd, h, weight, bias, eps)
        else:
            mean.zero_()
            rstd.zero_()
        return y, h, mean, rstd

    def run_backward(
        grad_y: torch.Tensor,
        grad_h: torch.Tensor | None,
        h: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        *needs: bool,
    ) -> tuple[torch.Tensor, ...]:
        gradients = empty_gradients((h, weight, weight), needs)
        if not h.numel():
            for gradient in gradients:
                gradient.zero_()
            return gradients
        backward(*gradients, Needs(*needs), grad_y, h, weight, mean, rstd)
        if grad_h is None or not needs[0]:
            return gradients
        return add(gradients[0], grad_h), *gradients[1:]

    operator = operators.define(
        f"add_layer_norm_{backend}(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps)"
        " -> (Tensor y, Tensor h, Tensor mean, Tensor rstd)",
        run_forward,
        empty,
    )
    # x and residual have the same gradient, that of their sum.
    backward_operator = operators.define(
        f"add_layer_norm_{backend}_backward(Tensor grad_y, Tensor? grad_h, Tensor h, Tensor weight, Tensor mean,"
        " Tensor rstd, bool needs_sum, bool needs_weight, bool needs_bias)"
        " -> (Tensor grad_sum, Tensor grad_weight, Tensor grad_bias)",
        run_backward,
        lambda grad_y, grad_h, h, weight, mean, rstd, *needs: empty_gradients((h, weight, weight), needs),
    )
    operators.not_differentiable_twice(backward_operator)

    def save(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
        _, h, mean, rstd = output
        ctx.save_for_backward(h, inputs[2], mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        # An output that is not used has no cotangent, and needs no kernel that multiplies by zeros.
        ctx.set_materialize_grads(False)

    def differentiate(
        ctx: Any, grad_y: torch.Tensor | None, grad_h: torch.Tensor | None, *_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        needs_x, needs_residual, *needs = ctx.needs_input_grad[:4]
        h, weight, mean, rstd = ctx.saved_tensors
        if grad_y is None:
            return grad_h, grad_h, *(torch.zeros_like(weight) if needed else None for needed in needs), None
        found = backward_operator(grad_y, grad_h, h, weight, mean, rstd, needs_x or needs_residual, *needs)
        needed_gradients = (needs_x, needs_residual, *needs)
        gradients = (found[0], *found)
        return *(gradient if needed else None for gradient, needed in zip(gradients, needed_gradients)), None

    return operators.differentiate(operator, differentiate, save)
