"""embedding in Triton: rows are copied; a row's gradient adds up its cotangents, whose places are found first."""

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv, multiprocessors, next_power_of_2
from fourfold.backends.triton import launch as triton_launch

from .operators import FEW_IDS, ORDER_BYTES, by_row, register

TILE, MOST_COLS = 4096, 1024
TERMS, SUMMED, CHUNK = 8, 8192, 64  # cotangents of a row at a time; elements of them; and cotangents of a chunk
# Where places are found: rows of a program, ids of all rows at a time, and pairs of a row and an id of one.
ORDER_ROWS, ORDER_IDS, ORDER_KEPT = 64, 8192, 8192


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


@triton.jit
def cotangents(grad_output_ptr, places, among, columns, dim):
    """Return the columns of the cotangents of ids at some places; 0 elsewhere and past the end of a row."""
    mask = tl.expand_dims(among, -1) & (columns < dim)
    return tl.load(grad_output_ptr + tl.expand_dims(places, -1) * dim + columns, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_ids", "padding_idx"])
def embedding_few_backward_kernel(
    grad_output_ptr,  # [ids, dim]
    ids_ptr,  # [ids]
    grad_table_ptr,  # [vocab, dim]
    num_ids,
    dim,
    padding_idx,
    COMPUTE: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_COLS columns of a row of the table, and searches all ids for this row.
    row = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    at = tl.arange(0, BLOCK_IDS)
    ids = tl.load(ids_ptr + at, mask=at < num_ids, other=-1).to(tl.int64)
    found = (ids == row) & (row != padding_idx)
    numbers = tl.where(found, tl.cumsum(found.to(tl.int32), axis=0), 0)
    sums = tl.zeros((BLOCK_TERMS, BLOCK_COLS), COMPUTE)
    count = tl.max(numbers, axis=0)
    for tile in range(tl.cdiv(count, BLOCK_TERMS)):
        terms = tile * BLOCK_TERMS + 1 + tl.arange(0, BLOCK_TERMS)
        places = tl.sum(tl.where(numbers[None, :] == terms[:, None], at[None, :], 0), axis=1).to(tl.int64)
        sums += cotangents(grad_output_ptr, places, terms <= count, columns, dim).to(COMPUTE)
    total = tl.sum(sums, axis=0).to(grad_table_ptr.dtype.element_ty)
    tl.store(grad_table_ptr + row * dim + columns, total, mask=columns < dim)


@triton.jit(do_not_specialize=["num_chunks", "vocab", "padding_idx"])
def embedding_backward_kernel(
    grad_output_ptr,  # [ids, dim]
    ids_ptr,  # [ids]
    order_ptr,  # [ids]
    starts_ptr,  # [vocab + 1]
    ready_ptr,  # [blocks of columns, num_chunks], of zeros
    chunks_ptr,  # [num_chunks, dim]
    grad_table_ptr,  # [vocab, dim]
    num_chunks,
    vocab,
    dim,
    padding_idx,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNK_TERMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_COLS columns of a chunk of CHUNK cotangents of a row, whose last chunk is longer, or of
    # BLOCK_ROWS rows of fewer cotangents. Chunk i of a row is number i of the multiples of CHUNK in its part of the
    # order. Each sum has as many parts, whatever the other rows are.
    columns = (tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    inside = columns < dim
    chunk = tl.program_id(0).to(tl.int64)
    if chunk >= num_chunks:
        rows = (tl.program_id(0) - num_chunks).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        there = rows < vocab
        begins = tl.load(starts_ptr + rows, mask=there, other=0)
        ends = tl.load(starts_ptr + rows + 1, mask=there & (rows != padding_idx), other=0)
        there &= ends - begins < CHUNK
        ends = tl.where(there, ends, begins)
        sums = tl.zeros((BLOCK_ROWS, BLOCK_TERMS, BLOCK_COLS), COMPUTE)
        for tile in range(tl.cdiv(tl.max(ends - begins, axis=0), BLOCK_TERMS)):
            terms = begins[:, None] + tile * BLOCK_TERMS + tl.arange(0, BLOCK_TERMS)[None, :]
            among = terms < ends[:, None]
            places = tl.load(order_ptr + terms, mask=among, other=0)
            sums += cotangents(grad_output_ptr, places, among, columns, dim).to(COMPUTE)
        to_ptr = grad_table_ptr + rows.to(tl.int64)[:, None] * dim + columns[None, :]
        total = tl.sum(sums, axis=1).to(grad_table_ptr.dtype.element_ty)
        tl.store(to_ptr, total, mask=there[:, None] & inside[None, :])
    elif chunk * CHUNK < tl.load(starts_ptr + vocab):
        row = tl.load(ids_ptr + tl.load(order_ptr + chunk * CHUNK)).to(tl.int64)
        begin = tl.load(starts_ptr + tl.maximum(row, 0))  # ids below 0 come first in sorted ones
        end = tl.load(starts_ptr + tl.maximum(row, 0) + 1)
        first_chunk, chunks = (begin + CHUNK - 1) // CHUNK, (end - begin) // CHUNK
        number = chunk - first_chunk
        if (number < chunks) & (row >= 0) & (row != padding_idx):
            first = begin + number * CHUNK
            end = tl.where(number < chunks - 1, first + CHUNK, end)
            parts = tl.zeros((CHUNK_TERMS, BLOCK_COLS), COMPUTE)
            for start in range(first, end, CHUNK_TERMS):
                terms = start + tl.arange(0, CHUNK_TERMS)
                places = tl.load(order_ptr + terms, mask=terms < end, other=0)
                parts += cotangents(grad_output_ptr, places, terms < end, columns, dim).to(COMPUTE)
            tl.store(chunks_ptr + chunk * dim + columns, tl.sum(parts, axis=0), mask=inside)
            tl.debug_barrier()
            ready_ptr += tl.program_id(1).to(tl.int64) * num_chunks + first_chunk
            if tl.atomic_add(ready_ptr, 1, sem="acq_rel", scope="gpu") == chunks - 1:
                # The last program to finish a chunk of this row adds them up.
                tl.debug_barrier()
                parts = tl.zeros((CHUNK_TERMS, BLOCK_COLS), COMPUTE)
                for start in range(first_chunk, first_chunk + chunks, CHUNK_TERMS):
                    terms = start + tl.arange(0, CHUNK_TERMS)
                    mask = (terms < first_chunk + chunks)[:, None] & inside[None, :]
                    from_ptr = chunks_ptr + terms[:, None] * dim + columns[None, :]
                    # .cg reads from the L2 cache, which has the results of other multiprocessors.
                    parts += tl.load(from_ptr, mask=mask, other=0.0, cache_modifier=".cg")
                total = tl.sum(parts, axis=0).to(grad_table_ptr.dtype.element_ty)
                tl.store(grad_table_ptr + row * dim + columns, total, mask=inside)


@triton.jit
def kept_ids(kept_ptr, start, end, ROWS: tl.constexpr, BLOCK_KEPT: tl.constexpr):
    """Return of kept ids from start to end which are there, their places, and whose each is, [ROWS, BLOCK_KEPT]."""
    at = start + tl.arange(0, BLOCK_KEPT)
    kept = tl.load(kept_ptr + at, mask=at < end, other=0)
    of_row = ((kept % ROWS)[None, :] == tl.arange(0, ROWS)[:, None]) & (at < end)[None, :]
    return at < end, kept // ROWS, of_row.to(tl.int32)


@triton.jit(do_not_specialize=["num_ids", "vocab", "num_ready"])
def embedding_order_kernel(
    ids_ptr,  # [num_ids]
    kept_ptr,  # [num_ids]
    order_ptr,  # [num_ids]
    starts_ptr,  # [vocab + 1]
    ready_ptr,  # [num_ready]
    num_ids,
    vocab,
    num_ready,
    ROWS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
):
    # One program owns ROWS rows of the table. It keeps the ids of these rows, and then writes their places by row.
    for start in range(tl.program_id(0) * BLOCK_IDS, num_ready, tl.num_programs(0) * BLOCK_IDS):
        at = start + tl.arange(0, BLOCK_IDS)
        tl.store(ready_ptr + at, tl.zeros((BLOCK_IDS,), tl.int32), mask=at < num_ready)
    first = tl.program_id(0).to(tl.int64) * ROWS
    numbers = tl.arange(0, ROWS)
    lower = tl.zeros((BLOCK_IDS,), tl.int32)
    rows = tl.full((BLOCK_IDS,), -1, tl.int64)
    for start in range(0, num_ids, BLOCK_IDS):
        at = start + tl.arange(0, BLOCK_IDS)
        rows = tl.load(ids_ptr + at, mask=at < num_ids, other=-1).to(tl.int64)
        lower += ((rows >= 0) & (rows < first)).to(tl.int32)
    begin = tl.sum(lower, axis=0)
    end = begin
    for start in range(0, num_ids, BLOCK_IDS):
        at = start + tl.arange(0, BLOCK_IDS)
        if num_ids > BLOCK_IDS:
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


def _order(ids: torch.Tensor, vocab: int, ready: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = min(max(next_power_of_2(cdiv(vocab, multiprocessors(ids.device))), 2), ORDER_ROWS)
    programs = cdiv(vocab, rows)
    if programs * ids.nbytes > ORDER_BYTES[ids.device.type]:
        ready.zero_()
        return by_row(ids, vocab)
    sizes = len(ids), len(ids), vocab + 1
    kept, order, starts = (torch.empty(size, dtype=torch.int64, device=ids.device) for size in sizes)
    options = {"ROWS": rows, "BLOCK_IDS": ORDER_IDS, "BLOCK_KEPT": ORDER_KEPT // rows, "num_warps": 8}
    tensors, scalars = (ids, kept, order, starts, ready), (len(ids), vocab, ready.numel())
    triton_launch.launch(embedding_order_kernel, (programs,), tensors, scalars, **options)
    return order, starts


def _launch_backward(grad_table: torch.Tensor, grad_output: torch.Tensor, ids: torch.Tensor, padding_idx: int) -> None:
    (vocab, dim), num_ids = grad_table.shape, len(ids)
    block_cols = min(next_power_of_2(dim), MOST_COLS)
    across, options = cdiv(dim, block_cols), {"COMPUTE": triton_launch.COMPUTE[grad_table.dtype]}
    if num_ids <= FEW_IDS[ids.device.type]:
        triton_launch.launch(
            embedding_few_backward_kernel,
            (vocab, across),
            (grad_output, ids, grad_table),
            (num_ids, dim, padding_idx),
            **options,
            BLOCK_IDS=next_power_of_2(num_ids),
            BLOCK_TERMS=TERMS,
            BLOCK_COLS=block_cols,
            num_warps=max(block_cols // 256, 1),
        )
        return
    num_chunks = cdiv(num_ids, CHUNK)
    ready = torch.empty((across, num_chunks), dtype=torch.int32, device=ids.device)
    order, starts = _order(ids, vocab, ready)
    compute = torch.promote_types(grad_table.dtype, torch.float32)
    chunks = torch.empty((num_chunks, dim), dtype=compute, device=ids.device)
    block_rows = SUMMED // (TERMS * block_cols)
    triton_launch.launch(
        embedding_backward_kernel,
        (num_chunks + cdiv(vocab, block_rows), across),
        (grad_output, ids, order, starts, ready, chunks, grad_table),
        (num_chunks, vocab, dim, padding_idx),
        **options,
        INDEX=triton_launch.index_type(vocab + block_rows),
        CHUNK=CHUNK,
        CHUNK_TERMS=min(SUMMED // block_cols, CHUNK),
        BLOCK_ROWS=block_rows,
        BLOCK_TERMS=TERMS,
        BLOCK_COLS=block_cols,
    )


embedding = register("triton", _launch, _launch_backward)
