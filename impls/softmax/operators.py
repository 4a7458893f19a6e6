"""The operators of softmax: the same on Triton and CUDA C++ but for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from impls import operators


def define_softmax(
    backend: str, forward: Callable[..., torch.Tensor], backward: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Register ``softmax_<backend>`` with its gradient, which is taken from the output.

    Args:
        backend: part of the operator's name.
        forward: ``(x)`` to the output, contiguous.
        backward: ``(grad_output, output)`` to the gradient, contiguous.
    """

    def fake(like: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return like.new_empty(like.shape)

    forward_operator = operators.define(f"softmax_{backend}(Tensor x) -> Tensor", forward, fake)
    backward_operator = operators.define(
        f"softmax_{backend}_backward(Tensor grad_output, Tensor output) -> Tensor", backward, fake
    )

    def save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    def differentiate(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        return backward_operator(grad_output, *ctx.saved_tensors)

    operators.differentiate(forward_operator, differentiate, save)
    operators.not_differentiable_twice(backward_operator)
    return forward_operator
