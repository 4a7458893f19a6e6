"""The operators of giou_loss: the same on Triton and CUDA C++ but for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from impls import operators
from impls.giou.operators import gradient_buffers

# Of `saved`, int32: the number of valid rows in 64 bits, then a bit a row, lowest first, which says if it is valid.
SAVED_HEADER = 2


def num_saved(num_rows: Any) -> Any:
    """Length of `saved` for so many rows."""
    return SAVED_HEADER + (num_rows + 31) // 32


def define_giou_loss(backend: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``giou_loss_<backend>`` with its gradient.

    Args:
        backend: part of the operator's name.
        forward: ``(pred, target, eps)`` to the loss and `saved`.
        backward: ``(grad_output, pred, target, saved, eps, needs_pred, needs_target)`` to two gradients.
    """

    def fake_forward(pred: torch.Tensor, target: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        saved = num_saved(pred.shape[0] * pred.shape[1])
        return pred.new_empty(()), torch.empty(saved, dtype=torch.int32, device=pred.device)

    def fake_backward(
        grad_output: torch.Tensor,
        pred: torch.Tensor,
        target: torch.Tensor,
        saved: torch.Tensor,
        eps: float,
        needs_pred: bool,
        needs_target: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient_buffers(pred, target, needs_pred, needs_target)

    forward_operator = operators.define(
        f"giou_loss_{backend}(Tensor pred, Tensor target, float eps) -> (Tensor, Tensor)", forward, fake_forward
    )
    backward_operator = operators.define(
        f"giou_loss_{backend}_backward(Tensor grad_output, Tensor pred, Tensor target, Tensor saved, float eps,"
        " bool needs_pred, bool needs_target) -> (Tensor, Tensor)",
        backward,
        fake_backward,
    )

    def save(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        pred, target, ctx.eps = inputs
        ctx.save_for_backward(pred, target, output[1])
        ctx.mark_non_differentiable(output[1])

    def differentiate(ctx: Any, grad_output: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        pred, target, saved = ctx.saved_tensors
        needs_pred, needs_target, _ = ctx.needs_input_grad
        grad_pred, grad_target = backward_operator(grad_output, pred, target, saved, ctx.eps, needs_pred, needs_target)
        return grad_pred if needs_pred else None, grad_target if needs_target else None, None

    operators.not_differentiable_twice(backward_operator)
    return operators.differentiate(forward_operator, differentiate, save)
