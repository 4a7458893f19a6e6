"""embedding in CUDA C++: rows are copied; a row's gradient adds up its cotangents, whose places are found first."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.launch import cdiv, multiprocessors, next_power_of_2, resident

from ..cuda_elementwise import WIDTHS, aligned
from .operators import by_row, register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
BLOCK = 256
ORDER_BLOCK, ORDER_ROWS = 1024, 64
# The most bytes of ids that all blocks read before it is faster to sort them. On the CPU some cases are sorted, too.
ORDER_BYTES = {"cuda": 1 << 29, "cpu": 1 << 15}
FEW_IDS = 16  # the most ids of a row that a block does not share
FORWARD = CudaKernel.instances(SOURCE, "embedding_forward_kernel<{T}, {}>", WIDTHS)
ORDER = CudaKernel(SOURCE, "embedding_order_kernel")
BACKWARD = CudaKernel.instances(
    SOURCE,
    "embedding_backward_kernel<{T}, {}>",
    {(whole, shared): f"{WIDTHS[whole]}, {str(shared).lower()}" for whole in WIDTHS for shared in (True, False)},
)
KERNELS = (*FORWARD.values(), ORDER, *BACKWARD.values())


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


def _order(ids: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = cdiv(vocab, ORDER_ROWS)
    if blocks * ids.nbytes > ORDER_BYTES[ids.device.type]:
        return by_row(ids, vocab)
    order, starts = (torch.empty(size, dtype=torch.int64, device=ids.device) for size in (len(ids), vocab + 1))
    ORDER.launch(blocks, ORDER_BLOCK, ids, order, starts, len(ids), vocab, ids.dtype == torch.int64)
    return order, starts


def _launch_backward(
    grad_table: torch.Tensor, grad_output: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, padding_idx: int
) -> None:
    (vocab, dim), width, device = grad_table.shape, 16 // grad_table.element_size(), grad_table.device
    vectors = aligned(grad_output, grad_table) and dim % width == 0
    across = cdiv(dim, width) if vectors else dim
    along, shared = min(next_power_of_2(across), BLOCK), len(order) > FEW_IDS * vocab
    while shared and along > 32 and vocab * cdiv(across, along) < 2 * multiprocessors(device):
        along //= 2
    grid = vocab if shared else cdiv(vocab, BLOCK // along), cdiv(across, along)
    tensors = (grad_output, order, starts, grad_table)
    kernel = BACKWARD[grad_table.dtype, (vectors, shared)]
    kernel.launch(grid, (along, BLOCK // along), *tensors, vocab, dim, padding_idx)


embedding = register("cuda", _launch, _launch_backward, _order)
