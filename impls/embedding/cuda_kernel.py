"""embedding in CUDA C++: rows are copied, and their cotangents are added in the order of their places."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.launch import cdiv, next_power_of_2, resident

from ..cuda_elementwise import WIDTHS, aligned
from .arguments import check_embedding
from .operators import register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
BLOCK = 256
FORWARD = CudaKernel.instances(SOURCE, "embedding_forward_kernel<{T}, {}>", WIDTHS)
BACKWARD = CudaKernel.instances(SOURCE, "embedding_backward_kernel<{T}, {}>", WIDTHS)
KERNELS = (*FORWARD.values(), *BACKWARD.values())


def _shape(rows: int, vectors: int, device: torch.device) -> tuple[int, tuple[int, int]]:
    """Return the blocks for as many rows of as many vectors, and the threads of a block along and across the rows."""
    along = min(next_power_of_2(vectors), BLOCK)
    return min(cdiv(rows, BLOCK // along), resident(device, 32)), (along, BLOCK // along)


def _launch(output: torch.Tensor, table: torch.Tensor, ids: torch.Tensor) -> None:
    (vocab, dim), (row_stride, column_stride), width = table.shape, table.stride(), 16 // table.element_size()
    vectors = aligned(table, output) and column_stride == 1 and dim % width == row_stride % width == 0
    shape = _shape(ids.shape[0], dim // width if vectors else dim, table.device)
    sizes = (ids.shape[0], vocab, dim, row_stride, column_stride, ids.dtype == torch.int64)
    FORWARD[table.dtype, vectors].launch(*shape, table, ids, output, *sizes)


def _launch_backward(
    grad_table: torch.Tensor, grad_output: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, padding_idx: int
) -> None:
    (vocab, dim), width = grad_table.shape, 16 // grad_table.element_size()
    vectors = aligned(grad_output, grad_table) and dim % width == 0
    shape = _shape(vocab, dim // width if vectors else dim, grad_table.device)
    BACKWARD[grad_table.dtype, vectors].launch(*shape, grad_output, order, starts, grad_table, vocab, dim, padding_idx)


embedding_operator = register("cuda", _launch, _launch_backward)


def embedding(table: torch.Tensor, ids: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Return the rows of a table: see `fourfold.impls.embedding.torch_eager.embedding`."""
    check_embedding(table, ids, padding_idx)
    return embedding_operator(table, ids, padding_idx)
