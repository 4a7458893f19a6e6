"""embedding in CUDA C++: rows are copied, and their cotangents are added in the order of their places."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.launch import cdiv, multiprocessors, next_power_of_2, resident

from ..cuda_elementwise import WIDTHS, aligned
from .operators import register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
BLOCK = 256
FORWARD = CudaKernel.instances(SOURCE, "embedding_forward_kernel<{T}, {}>", WIDTHS)
BACKWARD = CudaKernel.instances(SOURCE, "embedding_backward_kernel<{T}, {}>", WIDTHS)
# Of the scan: threads of a block, rows of a thread, and bytes of ids that all blocks read, beyond which to sort is faster.
SCAN_BLOCK, SCAN_ROWS, SCAN_BYTES = 512, (1, 8), 1 << 29
SCAN = {
    rows: CudaKernel.instances(SOURCE, f"embedding_backward_scan_kernel<{{T}}, {{}}, {rows}>", WIDTHS)
    for rows in SCAN_ROWS
}
KERNELS = (*(kernel for kernels in SCAN.values() for kernel in kernels.values()), *FORWARD.values(), *BACKWARD.values())


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


def _scan(grad_table: torch.Tensor, grad_output: torch.Tensor, ids: torch.Tensor, padding_idx: int) -> bool:
    (vocab, dim), width, device = grad_table.shape, 16 // grad_table.element_size(), grad_table.device
    vectors = aligned(grad_output, grad_table) and dim % width == 0
    most = multiprocessors(device)
    along = min(next_power_of_2(dim // width if vectors else dim), SCAN_BLOCK)
    columns = cdiv(dim, along * (width if vectors else 1))
    across = SCAN_BLOCK // along
    # As many rows for a block as leave each multiprocessor a block; if there are too few, blocks of fewer columns.
    rows = SCAN_ROWS[cdiv(vocab, across * SCAN_ROWS[1]) * columns >= most]
    while rows == 1 and along > 32 and cdiv(vocab, across) * columns < most:
        along, columns = along // 2, columns * 2
    blocks = cdiv(vocab, across * rows)
    if blocks * columns * ids.nbytes > SCAN_BYTES or len(ids) >= 1 << 30:
        return False
    sizes = len(ids), vocab, dim, padding_idx, ids.dtype == torch.int64
    SCAN[rows][grad_table.dtype, vectors].launch(
        (blocks, columns), (along, across), grad_output, ids, grad_table, *sizes
    )
    return True


embedding = register("cuda", _launch, _launch_backward, _scan)
