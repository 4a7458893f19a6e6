"""embedding in Triton: rows are copied; a row's gradient adds up its cotangents, whose places are found first."""

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv, multiprocessors, next_power_of_2
from fourfold.backends.triton import launch as triton_launch

from .operators import FEW_IDS, ORDER_BYTES, by_row, register

TILE, MOST_COLS = 4096, 1024
TERMS, SUMMED = 8, 8192  # of a row of the table at a time: cotangents; and elements of them
CHUNK, CHUNK_TERMS, CHUNK_COLS = 64, 16, 256  # cotangents of a chunk, and of these at a time, and their columns
# Where places are found: rows of a program, ids of all rows at a time, and pairs of a row and an id of one.
ORDER_ROWS, ORDER_IDS, ORDER_KEPT = 16, 2048, 1024


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
def embedding_chunks_kernel(
    grad_output_ptr,  # [ids, dim]
    ids_ptr,  # [ids]
    order_ptr,  # [ids]
    starts_ptr,  # [vocab + 1]
    chunks_ptr,  # [ids / CHUNK, dim]
    vocab,
    dim,
    padding_idx,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_COLS columns of a chunk of CHUNK cotangents of a row; a row's last chunk is longer. Chunk i
    # of a row is number i of the multiples of CHUNK in its part of the order.
    chunk = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    if chunk * CHUNK < tl.load(starts_ptr + vocab):
        row = tl.load(ids_ptr + tl.load(order_ptr + chunk * CHUNK)).to(tl.int64)
        begin = tl.load(starts_ptr + tl.maximum(row, 0))  # ids below 0 come first in sorted ones
        first = begin + (chunk - (begin + CHUNK - 1) // CHUNK) * CHUNK
        left = tl.load(starts_ptr + tl.maximum(row, 0) + 1) - first
        if (left >= CHUNK) & (row >= 0) & (row != padding_idx):
            sums = tl.zeros((BLOCK_TERMS, BLOCK_COLS), COMPUTE)
            count = tl.where(left < 2 * CHUNK, left, CHUNK).to(tl.int32)
            for start in range(0, count, BLOCK_TERMS):
                terms = start + tl.arange(0, BLOCK_TERMS)
                places = tl.load(order_ptr + first + terms, mask=terms < count, other=0)
                from_ptr = grad_output_ptr + places[:, None] * dim + columns[None, :]
                mask = (terms < count)[:, None] & (columns < dim)[None, :]
                sums += tl.load(from_ptr, mask=mask, other=0.0).to(COMPUTE)
            tl.store(chunks_ptr + chunk * dim + columns, tl.sum(sums, axis=0), mask=columns < dim)


@triton.jit(do_not_specialize=["vocab", "padding_idx"])
def embedding_backward_kernel(
    grad_output_ptr,  # [ids, dim]
    order_ptr,  # [ids]
    starts_ptr,  # [vocab + 1]
    chunks_ptr,  # [ids / CHUNK, dim]
    grad_table_ptr,  # [vocab, dim]
    vocab,
    dim,
    padding_idx,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_COLS columns of BLOCK_ROWS rows of the table. It adds up a row's cotangents, or its chunks
    # if it has some. Each sum has BLOCK_TERMS parts, whatever the other rows are.
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = rows < vocab
    columns = (tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    inside = columns < dim
    begins = tl.load(starts_ptr + rows, mask=there, other=0)
    ends = tl.load(starts_ptr + rows + 1, mask=there & (rows != padding_idx), other=0)
    chunks = tl.maximum(ends - begins, 0) // CHUNK
    first_chunks = (begins + CHUNK - 1) // CHUNK
    ends = tl.where(chunks > 0, begins, ends)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_TERMS, BLOCK_COLS), COMPUTE)
    for tile in range(tl.cdiv(tl.max(ends - begins, axis=0), BLOCK_TERMS)):
        terms = begins[:, None] + tile * BLOCK_TERMS + tl.arange(0, BLOCK_TERMS)[None, :]
        among = terms < ends[:, None]
        places = tl.load(order_ptr + terms, mask=among, other=0)
        from_ptr = grad_output_ptr + places[:, :, None] * dim + columns[None, None, :]
        sums += tl.load(from_ptr, mask=among[:, :, None] & inside[None, None, :], other=0.0).to(COMPUTE)
    for tile in range(tl.cdiv(tl.max(chunks, axis=0), BLOCK_TERMS)):
        terms = tile * BLOCK_TERMS + tl.arange(0, BLOCK_TERMS)[None, :]
        among = terms < chunks[:, None]
        from_ptr = chunks_ptr + (first_chunks[:, None] + terms)[:, :, None] * dim + columns[None, None, :]
        sums += tl.load(from_ptr, mask=among[:, :, None] & inside[None, None, :], other=0.0)
    to_ptr = grad_table_ptr + rows.to(tl.int64)[:, None] * dim + columns[None, :]
    found = tl.sum(sums, axis=1).to(grad_table_ptr.dtype.element_ty)
    tl.store(to_ptr, found, mask=there[:, None] & inside[None, :])


@triton.jit
def kept_ids(kept_ptr, start, end, ROWS: tl.constexpr, BLOCK_KEPT: tl.constexpr):
    """Return of kept ids from start to end which are there, their places, and whose each is, [ROWS, BLOCK_KEPT]."""
    at = start + tl.arange(0, BLOCK_KEPT)
    kept = tl.load(kept_ptr + at, mask=at < end, other=0)
    of_row = ((kept % ROWS)[None, :] == tl.arange(0, ROWS)[:, None]) & (at < end)[None, :]
    return at < end, kept // ROWS, of_row.to(tl.int32)


@triton.jit(do_not_specialize=["num_ids", "vocab"])
def embedding_order_kernel(
    ids_ptr,  # [num_ids]
    kept_ptr,  # [num_ids]
    order_ptr,  # [num_ids]
    starts_ptr,  # [vocab + 1]
    num_ids,
    vocab,
    ROWS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
):
    # One program owns ROWS rows of the table. It keeps the ids of these rows, and then writes their places by row.
    first = tl.program_id(0).to(tl.int64) * ROWS
    numbers = tl.arange(0, ROWS)
    lower = tl.zeros((BLOCK_IDS,), tl.int32)
    for start in range(0, num_ids, BLOCK_IDS):
        at = start + tl.arange(0, BLOCK_IDS)
        rows = tl.load(ids_ptr + at, mask=at < num_ids, other=-1).to(tl.int64)
        lower += ((rows >= 0) & (rows < first)).to(tl.int32)
    begin = tl.sum(lower, axis=0)
    end = begin
    for start in range(0, num_ids, BLOCK_IDS):
        at = start + tl.arange(0, BLOCK_IDS)
        rows = tl.load(ids_ptr + at, mask=at < num_ids, other=-1).to(tl.int64)
        here = (rows >= first) & (rows < tl.minimum(first + ROWS, vocab))
        count = tl.cumsum(here.to(tl.int32), axis=0)
        tl.store(kept_ptr + end + count - 1, at.to(tl.int64) * ROWS + rows - first, mask=here)
        end += tl.max(count, axis=0)
    tl.debug_barrier()  # other threads than those that stored the ids may read them
    counts = tl.zeros((ROWS,), tl.int32)
    for start in range(begin, end, BLOCK_KEPT):
        _, _, of_row = kept_ids(kept_ptr, start, end, ROWS, BLOCK_KEPT)
        counts += tl.sum(of_row, axis=1)
    ends = begin + tl.cumsum(counts, axis=0)
    tl.store(starts_ptr + first + numbers + 1, ends.to(tl.int64), mask=first + numbers < vocab)
    if first == 0:
        tl.store(starts_ptr, begin.to(tl.int64))
    nexts = ends - counts
    for start in range(begin, end, BLOCK_KEPT):
        there, places, of_row = kept_ids(kept_ptr, start, end, ROWS, BLOCK_KEPT)
        slots = nexts[:, None] + tl.cumsum(of_row, axis=1) - 1
        tl.store(order_ptr + tl.sum(slots * of_row, axis=0), places, mask=there)
        nexts += tl.sum(of_row, axis=1)


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


def _order(ids: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = min(max(next_power_of_2(cdiv(vocab, multiprocessors(ids.device))), 2), ORDER_ROWS)
    programs = cdiv(vocab, rows)
    if programs * ids.nbytes > ORDER_BYTES[ids.device.type]:
        return by_row(ids, vocab)
    sizes = len(ids), len(ids), vocab + 1
    kept, order, starts = (torch.empty(size, dtype=torch.int64, device=ids.device) for size in sizes)
    options = {"ROWS": rows, "BLOCK_IDS": ORDER_IDS, "BLOCK_KEPT": ORDER_KEPT // rows, "num_warps": 8}
    tensors = (ids, kept, order, starts)
    triton_launch.launch(embedding_order_kernel, (programs,), tensors, (len(ids), vocab), **options)
    return order, starts


def _launch_backward(grad_table: torch.Tensor, grad_output: torch.Tensor, ids: torch.Tensor, padding_idx: int) -> None:
    (vocab, dim), compute = grad_table.shape, torch.promote_types(grad_table.dtype, torch.float32)
    order, starts = _order(ids, vocab)
    sizes, options = (vocab, dim, padding_idx), {"COMPUTE": triton_launch.COMPUTE[grad_table.dtype], "CHUNK": CHUNK}
    chunks = torch.empty((cdiv(len(ids), CHUNK), dim), dtype=compute, device=ids.device)
    if len(ids) > FEW_IDS[ids.device.type]:
        triton_launch.launch(
            embedding_chunks_kernel,
            (len(chunks), cdiv(dim, CHUNK_COLS)),
            (grad_output, ids, order, starts, chunks),
            sizes,
            **options,
            BLOCK_TERMS=CHUNK_TERMS,
            BLOCK_COLS=CHUNK_COLS,
        )
    else:
        options["CHUNK"] = 1 << 30
    block_cols = min(next_power_of_2(dim), MOST_COLS)
    block_rows = SUMMED // (TERMS * block_cols)
    triton_launch.launch(
        embedding_backward_kernel,
        (cdiv(vocab, block_rows), cdiv(dim, block_cols)),
        (grad_output, order, starts, chunks, grad_table),
        sizes,
        **options,
        INDEX=triton_launch.index_type(vocab + block_rows),
        BLOCK_ROWS=block_rows,
        BLOCK_TERMS=TERMS,
        BLOCK_COLS=block_cols,
    )


embedding = register("triton", _launch, _launch_backward)
