"""The operators of quantised products, which Triton and CUDA C++ share except for the launches."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fourfold.backends.signature import signature_of

from . import torch_eager


def read_by_vectors(matrix: torch.Tensor) -> bool:
    """Return whether the terms of each row are adjacent, and begin at a multiple of 16 bytes."""
    return matrix.stride(1) == 1 and matrix.stride(0) % 16 == 0 and matrix.data_ptr() % 16 == 0


def scale_strides_of(scale_a: torch.Tensor, scale_b: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the strides of both scales, from row to row and from block to block of terms, which may have the same."""
    (a_row, *a_block), (b_row, *b_block) = scale_a.stride(), scale_b.stride()
    return a_row, *(a_block or [0]), b_row, *(b_block or [0])


def _no_gradient(ctx: Any, grad_output: torch.Tensor) -> Any:
    raise NotImplementedError("a product of quantised numbers has no gradient: they have none")


def _fake(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)


def register(backend: str, launch: Callable[..., None]) -> Iterator[Callable[..., Any]]:
    """Register the three operations of `torch_eager` on a backend, and yield the functions that call them.

    `launch` takes the inputs and the result, which is not empty.
    """

    def forward(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        output = _fake(a, b, scale_a, scale_b, out_dtype)
        if output.numel():
            launch(a, b, scale_a, scale_b, output)
        return output

    for definition in (torch_eager.scaled_matmul, torch_eager.rowwise_scaled_matmul, torch_eager.int8_matmul):
        signature = signature_of(definition)
        operator = signature.operator(_fake, backward=_no_gradient, repeats=True)
        yield signature.checked(operator.register(backend, forward))
