"""The operators of giou_loss_ragged: the same on Triton and CUDA C++ but for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from impls import operators
from impls.giou.operators import gradient_buffers


def define_giou_loss_ragged(
    backend: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Register ``giou_loss_ragged_<backend>`` with its gradient.

    Args:
        backend: part of the operator's name.
        forward: ``(pred, target, offsets, eps)`` to the loss.
        backward: ``(grad_output, pred, target, offsets, eps, needs_pred, needs_target)`` to two gradients.
    """

    def fake_forward(pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float) -> torch.Tensor:
        return pred.new_empty(())

    def fake_backward(
        grad_output: torch.Tensor,
        pred: torch.Tensor,
        target: torch.Tensor,
        offsets: torch.Tensor,
        eps: float,
        needs_pred: bool,
        needs_target: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient_buffers(pred, target, needs_pred, needs_target)

    forward_operator = operators.define(
        f"giou_loss_ragged_{backend}(Tensor pred, Tensor target, Tensor offsets, float eps) -> Tensor",
        forward,
        fake_forward,
    )
    backward_operator = operators.define(
        f"giou_loss_ragged_{backend}_backward(Tensor grad_output, Tensor pred, Tensor target, Tensor offsets,"
        " float eps, bool needs_pred, bool needs_target) -> (Tensor, Tensor)",
        backward,
        fake_backward,
    )

    def save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        pred, target, offsets, ctx.eps = inputs
        ctx.save_for_backward(pred, target, offsets)

    def differentiate(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pred, target, offsets = ctx.saved_tensors
        needs_pred, needs_target, _, _ = ctx.needs_input_grad
        grad_pred, grad_target = backward_operator(
            grad_output, pred, target, offsets, ctx.eps, needs_pred, needs_target
        )
        return grad_pred if needs_pred else None, grad_target if needs_target else None, None, None

    operators.not_differentiable_twice(backward_operator)
    return operators.differentiate(forward_operator, differentiate, save)
