"""embedding in CUDA C++: rows are copied; a row's gradient adds up its cotangents, whose places are found first."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.launch import cdiv, multiprocessors, next_power_of_2, resident

from ..cuda_elementwise import WIDTHS, aligned
from .operators import FEW_IDS, ORDER_BYTES, by_row, register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
BLOCK, WARP = 128, 32
MOST_ROWS, MOST_THREADS = 64, 1024  # of a block that finds places
SINGLES = 4  # columns of a lane that adds up cotangents, where it has no vectors
SUM_ROWS, CHUNK = 8, 64  # rows of a block that adds up cotangents, as many as its warps, and cotangents of a chunk
FORWARD = CudaKernel.instances(SOURCE, "embedding_forward_kernel<{T}, {}>", WIDTHS)
ORDER = CudaKernel(SOURCE, "embedding_order_kernel")
FEW_BACKWARD = CudaKernel.instances(SOURCE, "embedding_few_backward_kernel<{T}, {}>", WIDTHS)
BACKWARD = CudaKernel.instances(SOURCE, "embedding_backward_kernel<{T}, {}>", WIDTHS)
KERNELS = (*FORWARD.values(), ORDER, *FEW_BACKWARD.values(), *BACKWARD.values())


def _shape(rows: int, vectors: int, device: torch.device) -> tuple[int, tuple[int, int]]:
    """Return the blocks for as many rows of as many vectors, and the threads of a block along and across the rows."""
    along = min(next_power_of_2(vectors), WARP)
    return min(cdiv(rows, BLOCK // along), resident(device, 32)), (along, BLOCK // along)


def _launch(output: torch.Tensor, table: torch.Tensor, ids: torch.Tensor) -> None:
    (vocab, dim), (row_stride, column_stride), width = table.shape, table.stride(), 16 // table.element_size()
    vectors = aligned(table, output) and column_stride == 1 and dim % width == row_stride % width == 0
    shape = _shape(ids.shape[0], dim // width if vectors else dim, table.device)
    rows = (ids.shape[0], ids.dtype == torch.int64, vocab, table, row_stride)
    FORWARD[table.dtype, vectors].launch(*shape, ids, *rows, dim, column_stride, output)


def _order(ids: torch.Tensor, vocab: int, ready: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = min(cdiv(vocab, multiprocessors(ids.device)), MOST_ROWS)
    if cdiv(vocab, rows) * ids.nbytes > ORDER_BYTES[ids.device.type]:
        ready.zero_()
        return by_row(ids, vocab)
    order, starts = (torch.empty(size, dtype=torch.int64, device=ids.device) for size in (len(ids), vocab + 1))
    threads = min(max(next_power_of_2(len(ids)) // 8, 128), MOST_THREADS)
    sizes = len(ids), vocab, ready.numel(), rows, ids.dtype == torch.int64
    ORDER.launch(cdiv(vocab, rows), threads, ids, order, starts, ready, *sizes)
    return order, starts


def _launch_backward(grad_table: torch.Tensor, grad_output: torch.Tensor, ids: torch.Tensor, padding_idx: int) -> None:
    (vocab, dim), width, num_ids = grad_table.shape, 16 // grad_table.element_size(), len(ids)
    vectors = aligned(grad_output, grad_table) and dim % width == 0
    across, kind, threads = cdiv(dim, 32 * (width if vectors else SINGLES)), (grad_table.dtype, vectors), 32 * SUM_ROWS
    sizes, blocks = (vocab, dim, padding_idx, ids.dtype == torch.int64), cdiv(vocab, SUM_ROWS)
    if num_ids <= FEW_IDS[ids.device.type]:
        FEW_BACKWARD[kind].launch((blocks, across), threads, grad_output, ids, grad_table, num_ids, *sizes)
        return
    num_chunks = cdiv(num_ids, CHUNK)
    ready = torch.empty((across, num_chunks), dtype=torch.int32, device=ids.device)
    order, starts = _order(ids, vocab, ready)
    compute = torch.promote_types(grad_table.dtype, torch.float32)
    chunks = torch.empty((num_chunks, dim), dtype=compute, device=ids.device)
    tensors = (grad_output, ids, order, starts, ready, chunks, grad_table)
    BACKWARD[kind].launch((num_chunks + blocks, across), threads, *tensors, num_chunks, *sizes)


embedding = register("cuda", _launch, _launch_backward)
