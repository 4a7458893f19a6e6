"""The operators of topk: the same on Triton and CUDA C++ except for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends import operators
from fourfold.backends.signature import signature_of
from fourfold.backends.strides import as_rows

from .torch_eager import topk as definition


def empty(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unwritten values and indices."""
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def register(backend: str, launch: Callable[..., None], launch_backward: Callable[..., None]) -> Callable[..., Any]:
    """Register ``topk_<backend>`` with the gradient of its values.

    Args:
        backend: part of the operators' names.
        launch: ``(values, indices, rows, sizes, largest)`` writes values and indices. `rows` is x as
            `fourfold.backends.strides.Rows`, and sizes are the number of rows, their length n, and that of the axis
            inner. Nothing is empty.
        launch_backward: ``(grad_x, grad_values, indices)`` writes the cotangents to their places in grad_x, and 0
            elsewhere. All are without gaps, and none is empty.
    """

    def forward(x: torch.Tensor, k: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = empty(x, k)
        if values.numel():
            n, (inner, (rows,)) = x.shape[-1], as_rows(x)
            launch(values, indices, rows, (x.numel() // n, n, inner), largest)
        return values, indices

    def backward(grad_values: torch.Tensor, indices: torch.Tensor, n: int) -> torch.Tensor:
        shape = (*indices.shape[:-1], n)
        if not indices.numel():
            return grad_values.new_zeros(shape)
        grad_x = grad_values.new_empty(shape)
        launch_backward(grad_x, grad_values.contiguous(), indices.contiguous())
        return grad_x

    signature = signature_of(definition)
    operator = operators.define(
        signature.schema(f"topk_{backend}", "(Tensor values, Tensor indices)"),
        forward,
        lambda x, k, largest: empty(x, k),
        repeats=True,
    )
    backward_operator = operators.define(
        f"topk_{backend}_backward(Tensor grad_values, Tensor indices, SymInt n) -> Tensor grad_x",
        backward,
        lambda grad_values, indices, n: grad_values.new_empty((*indices.shape[:-1], n)),
    )
    operators.not_differentiable_twice(backward_operator)

    def save(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.n = inputs[0].shape[-1]
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    def differentiate(ctx: Any, grad_values: torch.Tensor, _: Any) -> tuple[torch.Tensor, None, None]:
        return backward_operator(grad_values, *ctx.saved_tensors, ctx.n), None, None

    return signature.checked(operators.differentiate(operator, differentiate, save))
