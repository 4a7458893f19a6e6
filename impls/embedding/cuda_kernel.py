"""embedding in CUDA C++: rows are copied; a row's gradient adds up its cotangents, whose places are found first."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.launch import cdiv, next_power_of_2, resident

from ..cuda_elementwise import WIDTHS, aligned
from .operators import FEW_IDS, register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
BLOCK, WARP = 256, 32
# As in cuda_kernel.cu: rows of a block that adds up cotangents, as many as its warps, and the most ids of a row whose
# places are written down.
SUM_ROWS, FEW = 8, 32
MOST_PARTS, SHARERS = 4, 4  # in which all ids are searched for a row of more; and blocks of a multiprocessor for these
FORWARD = CudaKernel.instances(SOURCE, "embedding_forward_kernel<{T}, {}>", WIDTHS)
PLACES = CudaKernel(SOURCE, "embedding_places_kernel")
FEW_BACKWARD = CudaKernel.instances(SOURCE, "embedding_few_backward_kernel<{T}, {}>", WIDTHS)
BACKWARD = CudaKernel.instances(SOURCE, "embedding_backward_kernel<{T}, {}>", WIDTHS)
KERNELS = (*FORWARD.values(), PLACES, *FEW_BACKWARD.values(), *BACKWARD.values())


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


def _launch_backward(grad_table: torch.Tensor, grad_output: torch.Tensor, ids: torch.Tensor, padding_idx: int) -> None:
    (vocab, dim), width, num_ids = grad_table.shape, 16 // grad_table.element_size(), len(ids)
    vectors = aligned(grad_output, grad_table) and dim % width == 0
    across, kind, threads = cdiv(dim, 32 * (width if vectors else 1)), (grad_table.dtype, vectors), 32 * SUM_ROWS
    wide, device, blocks = ids.dtype == torch.int64, ids.device, cdiv(vocab, SUM_ROWS)
    few_ids = FEW_IDS[device.type]
    if num_ids <= few_ids:
        numbers = num_ids, vocab, dim, padding_idx, wide
        FEW_BACKWARD[kind].launch((blocks, across), threads, grad_output, ids, grad_table, *numbers)
        return
    most, at_once = num_ids // (FEW + 1), few_ids * SUM_ROWS
    part = cdiv(num_ids, MOST_PARTS * at_once) * at_once
    num_parts = cdiv(num_ids, part)
    zeros = torch.zeros(vocab + 1 + across * most, dtype=torch.int32, device=device)
    counts, ready = zeros.split((vocab + 1, across * most))
    places, many = (torch.empty(size, dtype=torch.int32, device=device) for size in (vocab * FEW, most))
    PLACES.launch(cdiv(num_ids, WARP), WARP, ids, counts, places, many, num_ids, vocab, padding_idx, wide)
    compute = torch.promote_types(grad_table.dtype, torch.float32)
    parts = torch.empty((most * num_parts, dim), dtype=compute, device=device)
    sharers = min(most * num_parts, max(resident(device, SHARERS) // across, 1))
    shares = num_parts, part, few_ids, sharers
    tensors, sizes = (grad_output, ids, counts, places, many, ready, parts, grad_table), (num_ids, vocab, dim)
    BACKWARD[kind].launch((sharers + blocks, across), threads, *tensors, *sizes, most, *shares, wide)


embedding = register("cuda", _launch, _launch_backward)
