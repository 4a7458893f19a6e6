"""The operators of giou, and what those of its losses share: the same on Triton and CUDA C++ but for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from impls import operators


def as_rows(*tensors: torch.Tensor, trailing: int) -> list[torch.Tensor]:
    """The tensors with exactly two axes before the `trailing` last ones, as views where that is possible."""
    leading = tensors[0].ndim - trailing
    if leading == 2:
        return list(tensors)
    if leading == 1:
        return [t.unsqueeze(0) for t in tensors]
    return [t.reshape(1, -1, *t.shape[leading:]) for t in tensors]


def gradient_buffers(
    boxes1: torch.Tensor, boxes2: torch.Tensor, needs1: bool, needs2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous and unwritten; empty where a gradient is not needed."""
    return (
        torch.empty(boxes1.shape if needs1 else (0,), dtype=boxes1.dtype, device=boxes1.device),
        torch.empty(boxes2.shape if needs2 else (0,), dtype=boxes2.dtype, device=boxes2.device),
    )


def define_giou(backend: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``giou_<backend>`` with its gradient.

    Args:
        backend: part of the operator's name.
        forward: ``(boxes1, boxes2, eps)`` to the scores.
        backward: ``(grad_output, boxes1, boxes2, eps, needs1, needs2)`` to two gradients.
    """

    def fake_forward(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
        return boxes1.new_empty(boxes1.shape[:-1])

    def fake_backward(
        grad_output: torch.Tensor, boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float, needs1: bool, needs2: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient_buffers(boxes1, boxes2, needs1, needs2)

    forward_operator = operators.define(
        f"giou_{backend}(Tensor boxes1, Tensor boxes2, float eps) -> Tensor", forward, fake_forward
    )
    backward_operator = operators.define(
        f"giou_{backend}_backward(Tensor grad_output, Tensor boxes1, Tensor boxes2, float eps,"
        " bool needs1, bool needs2) -> (Tensor, Tensor)",
        backward,
        fake_backward,
    )

    def save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        boxes1, boxes2, ctx.eps = inputs
        ctx.save_for_backward(boxes1, boxes2)

    def differentiate(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        boxes1, boxes2 = ctx.saved_tensors
        needs1, needs2, _ = ctx.needs_input_grad
        grad_boxes1, grad_boxes2 = backward_operator(grad_output, boxes1, boxes2, ctx.eps, needs1, needs2)
        return grad_boxes1 if needs1 else None, grad_boxes2 if needs2 else None, None

    operators.not_differentiable_twice(backward_operator)
    return operators.differentiate(forward_operator, differentiate, save)
