"""The operators of matmul: the same on Triton and CUDA C++ but for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from impls import operators

# In kernels, activations are numbers.
ACTIVATION_NUMBERS = {"none": 0, "relu": 1, "leaky_relu": 2}


# Products of less work than these extents' are over before configurations can differ by much.
LITTLE_WORK = 512 * 512 * 512


def extent_class(extent: int) -> int:
    """Extents that one configuration serves alike: those between two powers of two."""
    return (extent - 1).bit_length() if extent else -1


def one_axis_dense(matrix: torch.Tensor) -> int | None:
    """The axis along which elements are next to each other, the other's apart by multiples of 16 bytes, as TMA asks."""
    if matrix.data_ptr() % 16 or 0 in matrix.shape:
        return None
    for axis in (1, 0):
        apart = matrix.stride(1 - axis)
        # Where there is but one row its distance to the next means nothing, but must still be a legal one.
        if matrix.stride(axis) == 1 and apart >= matrix.shape[axis] and apart * matrix.element_size() % 16 == 0:
            return axis
    return None


def define_matmul(
    backend: str, product: Callable[..., torch.Tensor], activation_backward: Callable[..., torch.Tensor]
) -> Callable[..., Any]:
    """Register ``matmul_<backend>`` with its gradient.

    Args:
        backend: part of the operator's name.
        product: ``(a, b, activation, negative_slope)`` to activation(a @ b), contiguous.
        activation_backward: ``(grad_output, output, activation, negative_slope)`` to the gradient of the product,
            contiguous and in the dtype of the output, by the output's sign.
    """

    def forward(a: torch.Tensor, b: torch.Tensor, activation: str, negative_slope: float) -> torch.Tensor:
        return product(a, b, activation, negative_slope)

    def fake_forward(a: torch.Tensor, b: torch.Tensor, activation: str, negative_slope: float) -> torch.Tensor:
        return a.new_empty((a.shape[0], b.shape[1]))

    def backward(
        grad_output: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        output: torch.Tensor | None,
        activation: str,
        negative_slope: float,
        needs_a: bool,
        needs_b: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad = grad_output
        if output is not None:
            grad = activation_backward(grad_output, output, activation, negative_slope)
        return (
            product(grad, b.t(), "none", 0.0) if needs_a else a.new_empty(0),
            product(a.t(), grad, "none", 0.0) if needs_b else b.new_empty(0),
        )

    def fake_backward(
        grad_output: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        output: torch.Tensor | None,
        activation: str,
        negative_slope: float,
        needs_a: bool,
        needs_b: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return a.new_empty(a.shape if needs_a else 0), b.new_empty(b.shape if needs_b else 0)

    forward_operator = operators.define(
        f"matmul_{backend}(Tensor a, Tensor b, str activation, float negative_slope) -> Tensor", forward, fake_forward
    )
    backward_operator = operators.define(
        f"matmul_{backend}_backward(Tensor grad_output, Tensor a, Tensor b, Tensor? output, str activation,"
        " float negative_slope, bool needs_a, bool needs_b) -> (Tensor, Tensor)",
        backward,
        fake_backward,
    )

    def save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        a, b, ctx.activation, ctx.negative_slope = inputs
        ctx.save_for_backward(a, b, None if ctx.activation == "none" else output)

    def differentiate(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b, output = ctx.saved_tensors
        needs_a, needs_b, *_ = ctx.needs_input_grad
        grad_a, grad_b = backward_operator(
            grad_output, a, b, output, ctx.activation, ctx.negative_slope, needs_a, needs_b
        )
        return grad_a if needs_a else None, grad_b if needs_b else None, None, None

    operators.differentiate(forward_operator, differentiate, save)
    operators.not_differentiable_twice(backward_operator)
    return forward_operator
