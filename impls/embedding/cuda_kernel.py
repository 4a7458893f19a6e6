"""embedding in CUDA C++: rows are copied; a row's gradient finds its cotangents in the ids, or in sorted ones."""

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
# Of the scan: threads of a block, rows of a thread, and the most ids of a row that are not shared by a block.
SCAN_BLOCK, SCAN_ROWS, FEW_IDS = 512, (4, 1), 16
# The most bytes of ids that all blocks read before it is faster to sort them. On the CPU some cases are sorted, too.
SCAN_BYTES = {"cuda": 1 << 29, "cpu": 1 << 17}
# By the rows of a thread; 0: the threads of a block share one row.
SCAN = {
    rows: CudaKernel.instances(
        SOURCE, f"embedding_backward_scan_kernel<{{T}}, {{}}, {max(rows, 1)}, {str(not rows).lower()}>", WIDTHS
    )
    for rows in (*SCAN_ROWS, 0)
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
    across = cdiv(dim, width) if vectors else dim
    most = multiprocessors(device)
    along = min(max(next_power_of_2(across), 32), SCAN_BLOCK)
    by_threads, by_block = (cdiv(vocab, n * SCAN_BLOCK // along) * cdiv(across, along) for n in SCAN_ROWS)
    rows = SCAN_ROWS[by_threads < most * 3 // 4]
    if by_threads < most * 3 // 4 > by_block and len(ids) > FEW_IDS * vocab:
        # One row for a block; if there are too few, blocks of fewer columns.
        rows = 0
        while along > 32 and vocab * cdiv(across, along) < most:
            along //= 2
    grid = cdiv(vocab, max(rows * SCAN_BLOCK // along, 1)), cdiv(across, along)
    if grid[0] * grid[1] * ids.nbytes > SCAN_BYTES[device.type]:
        return False
    SCAN[rows][grad_table.dtype, vectors].launch(
        grid,
        (along, SCAN_BLOCK // along),
        grad_output,
        ids,
        grad_table,
        len(ids),
        vocab,
        dim,
        padding_idx,
        ids.dtype == torch.int64,
    )
    return True


embedding = register("cuda", _launch, _launch_backward, _scan)
