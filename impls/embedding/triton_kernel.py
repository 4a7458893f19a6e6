"""embedding in Triton: rows are copied; a row's gradient finds its cotangents in the ids, or in sorted ones."""

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv, next_power_of_2
from fourfold.backends.triton import launch as triton_launch

from .operators import register

TILE, MOST_COLS = 4096, 1024
TERMS, MOST_SUMMED = 8, 128  # of a row of the table at a time: cotangents, and their columns


SCANNED_IDS = 1024  # ids of a program at a time, where it searches them
# The most ids of a row, and bytes of ids that all programs read, before it is faster to sort. On the CPU some cases are
# sorted, too.
SEARCHED_IDS, SCAN_BYTES = 32, {"cuda": 1 << 29, "cpu": 1 << 17}


@triton.jit(do_not_specialize=["num_ids", "vocab"])
def embedding_forward_kernel(
    table_ptr,  # [vocab, dim], strided
    ids_ptr,  # [num_ids]
    output_ptr,  # [num_ids, dim]
    num_ids,
    vocab,
    dim,
    row_stride,
    column_stride,
    INDEX: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_IDS consecutive ids.
    at = tl.program_id(0).to(INDEX) * BLOCK_IDS + tl.arange(0, BLOCK_IDS)
    there = at < num_ids
    rows = tl.load(ids_ptr + at, mask=there, other=0).to(tl.int64)
    known = there & (rows >= 0) & (rows < vocab)
    for start in range(0, dim, BLOCK_COLS):
        columns = (start + tl.arange(0, BLOCK_COLS)).to(tl.int64)[None, :]
        inside = columns < dim
        from_ptr = table_ptr + rows[:, None] * row_stride + columns * column_stride
        tile = tl.load(from_ptr, mask=known[:, None] & inside, other=float("nan"))
        tl.store(output_ptr + at.to(tl.int64)[:, None] * dim + columns, tile, mask=there[:, None] & inside)


@triton.jit(do_not_specialize=["vocab", "padding_idx"])
def embedding_backward_kernel(
    grad_output_ptr,  # [ids, dim]
    order_ptr,  # [ids]
    starts_ptr,  # [vocab + 1]
    grad_table_ptr,  # [vocab, dim]
    vocab,
    dim,
    padding_idx,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_COLS columns of BLOCK_ROWS rows of the table. Each sum has BLOCK_TERMS parts, whatever the
    # other rows are.
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = rows < vocab
    columns = (tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    inside = columns < dim
    begins = tl.load(starts_ptr + rows, mask=there, other=0)
    ends = tl.load(starts_ptr + rows + 1, mask=there & (rows != padding_idx), other=0)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_TERMS, BLOCK_COLS), COMPUTE)
    for tile in range(tl.cdiv(tl.max(ends - begins, axis=0), BLOCK_TERMS)):
        terms = begins[:, None] + tile * BLOCK_TERMS + tl.arange(0, BLOCK_TERMS)[None, :]
        among = terms < ends[:, None]
        places = tl.load(order_ptr + terms, mask=among, other=0)
        from_ptr = grad_output_ptr + places[:, :, None] * dim + columns[None, None, :]
        sums += tl.load(from_ptr, mask=among[:, :, None] & inside[None, None, :], other=0.0).to(COMPUTE)
    to_ptr = grad_table_ptr + rows.to(tl.int64)[:, None] * dim + columns[None, :]
    found = tl.sum(sums, axis=1).to(grad_table_ptr.dtype.element_ty)
    tl.store(to_ptr, found, mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_ids", "padding_idx"])
def embedding_backward_scan_kernel(
    grad_output_ptr,  # [num_ids, dim]
    ids_ptr,  # [num_ids]
    grad_table_ptr,  # [vocab, dim]
    num_ids,
    dim,
    padding_idx,
    COMPUTE: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_COLS columns of a row of the table. It searches BLOCK_IDS ids at a time for the row, and
    # adds up the cotangents of BLOCK_TERMS of them together, so that errors grow less than those of a single sum.
    row = tl.program_id(0)
    columns = (tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    inside = columns < dim
    sums = tl.zeros((BLOCK_COLS,), COMPUTE)
    end = tl.where(row == padding_idx, 0, num_ids)
    for start in range(0, end, BLOCK_IDS):
        at = start + tl.arange(0, BLOCK_IDS)
        ids = tl.load(ids_ptr + at, mask=at < num_ids, other=-1)
        hits = (ids == row).to(tl.int32)
        count = tl.sum(hits, axis=0)
        if count > 0:
            # Of each hit, how many come before it: the t-th one is where this number is t.
            numbers = tl.where(hits > 0, tl.cumsum(hits, axis=0) - 1, -1)
            for first in range(0, count, BLOCK_TERMS):
                terms = first + tl.arange(0, BLOCK_TERMS)
                places = tl.sum(tl.where(numbers[None, :] == terms[:, None], at[None, :], 0), axis=1)
                from_ptr = grad_output_ptr + places.to(tl.int64)[:, None] * dim + columns[None, :]
                mask = (terms < count)[:, None] & inside[None, :]
                sums += tl.sum(tl.load(from_ptr, mask=mask, other=0.0).to(COMPUTE), axis=0)
    tl.store(grad_table_ptr + row.to(tl.int64) * dim + columns, sums.to(grad_table_ptr.dtype.element_ty), mask=inside)


def _launch(output: torch.Tensor, table: torch.Tensor, ids: torch.Tensor) -> None:
    num_ids, (vocab, dim) = ids.shape[0], table.shape
    block_cols = min(next_power_of_2(dim), MOST_COLS)
    block_ids = TILE // block_cols
    triton_launch.launch(
        embedding_forward_kernel,
        (cdiv(num_ids, block_ids),),
        (table, ids, output),
        (num_ids, vocab, dim, *table.stride()),
        INDEX=triton_launch.index_type(num_ids + block_ids),
        BLOCK_IDS=block_ids,
        BLOCK_COLS=block_cols,
    )


def _launch_backward(
    grad_table: torch.Tensor, grad_output: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, padding_idx: int
) -> None:
    vocab, dim = grad_table.shape
    block_cols = min(next_power_of_2(dim), MOST_SUMMED)
    block_rows = TILE // (TERMS * block_cols)
    triton_launch.launch(
        embedding_backward_kernel,
        (cdiv(vocab, block_rows), cdiv(dim, block_cols)),
        (grad_output, order, starts, grad_table),
        (vocab, dim, padding_idx),
        COMPUTE=triton_launch.COMPUTE[grad_table.dtype],
        INDEX=triton_launch.index_type(vocab + block_rows),
        BLOCK_ROWS=block_rows,
        BLOCK_TERMS=TERMS,
        BLOCK_COLS=block_cols,
    )


def _scan(grad_table: torch.Tensor, grad_output: torch.Tensor, ids: torch.Tensor, padding_idx: int) -> bool:
    (vocab, dim), num_ids = grad_table.shape, len(ids)
    block_cols = min(next_power_of_2(dim), MOST_COLS)
    grid = vocab, cdiv(dim, block_cols)
    if num_ids > SEARCHED_IDS * vocab or vocab * grid[1] * ids.nbytes > SCAN_BYTES[ids.device.type]:
        return False
    triton_launch.launch(
        embedding_backward_scan_kernel,
        grid,
        (grad_output, ids, grad_table),
        (num_ids, dim, padding_idx),
        COMPUTE=triton_launch.COMPUTE[grad_table.dtype],
        BLOCK_IDS=SCANNED_IDS,
        BLOCK_TERMS=TERMS,
        BLOCK_COLS=block_cols,
    )
    return True


embedding = register("triton", _launch, _launch_backward, _scan)
