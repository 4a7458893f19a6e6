"""The operators of embedding: the same on Triton and CUDA C++ except for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends import operators
from fourfold.backends.signature import signature_of

from .torch_eager import embedding as definition

# Up to this number of ids no row is added up in chunks, and cuda_kernel.cu has room for all places. On the CPU it is
# small, so that cases have more.
FEW_IDS = {"cuda": 512, "cpu": 32}
# The most bytes of ids that all blocks read before it is faster to sort them. On the CPU some cases are sorted, too.
ORDER_BYTES = {"cuda": 1 << 29, "cpu": 1 << 15}


def empty(table: torch.Tensor, ids: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    """Return an unwritten output."""
    return table.new_empty((*ids.shape, table.shape[1]))


def by_row(ids: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of ids ``[n]`` in the order of their rows, and where each row's begin in it, ``[vocab + 1]``.

    Places of one row are in rising order, so that each sum of cotangents has one order.
    """
    rows, order = ids.sort(stable=True)
    return order, torch.searchsorted(rows, torch.arange(vocab + 1, dtype=rows.dtype, device=rows.device))


def register(
    backend: str,
    launch: Callable[..., None],
    launch_backward: Callable[..., None],
) -> Callable[..., Any]:
    """Register ``embedding_<backend>`` with the gradient of its table.

    Args:
        backend: part of the operators' names.
        launch: ``(output, table, ids)`` writes the output; ids are ``[n]`` without gaps, table is strided.
        launch_backward: ``(grad_table, grad_output, ids, padding_idx)`` writes the sums of each row's cotangents; ids
            are ``[n]`` without gaps; padding_idx is -1 for no row. No function is called for an empty result.
    """

    def forward(table: torch.Tensor, ids: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
        output = empty(table, ids, padding_idx)
        if output.numel():
            launch(output, table, ids.reshape(-1).contiguous())
        return output

    def backward(grad_output: torch.Tensor, ids: torch.Tensor, padding_idx: int | None, vocab: int) -> torch.Tensor:
        grad_table = grad_output.new_empty((vocab, grad_output.shape[-1]))
        if grad_table.numel():
            padding = -1 if padding_idx is None else padding_idx
            launch_backward(grad_table, grad_output.contiguous(), ids.reshape(-1).contiguous(), padding)
        return grad_table

    signature = signature_of(definition)
    operator = operators.define(signature.schema(f"embedding_{backend}"), forward, empty, repeats=True)
    backward_operator = operators.define(
        f"embedding_{backend}_backward(Tensor grad_output, Tensor ids, int? padding_idx, SymInt vocab) -> Tensor",
        backward,
        lambda grad_output, ids, padding_idx, vocab: grad_output.new_empty((vocab, grad_output.shape[-1])),
    )
    operators.not_differentiable_twice(backward_operator)

    def save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        table, ids, ctx.padding_idx = inputs
        ctx.vocab = table.shape[0]
        ctx.save_for_backward(ids)

    def differentiate(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return backward_operator(grad_output, *ctx.saved_tensors, ctx.padding_idx, ctx.vocab), None, None

    return signature.checked(operators.differentiate(operator, differentiate, save))
