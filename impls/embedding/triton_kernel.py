"""embedding in Triton: rows are copied; a row's gradient adds up its cotangents, whose places are found first."""

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv, next_power_of_2, resident
from fourfold.backends.triton import launch as triton_launch

from .operators import FEW_IDS, register

TILE_BYTES, MOST_COLS = 4096, 1024
SUM_COLS, WARP_COLS = 1024, 256  # columns of a program that adds up cotangents, and of each of its warps
FEW = 32  # the most ids of a row whose places are written down
# Parts in which all ids are searched for a row of more, fewer where their sums would take much memory; programs of a
# multiprocessor for these parts; and ids whose places a program writes.
PARTS, FEW_PARTS, MANY_IDS, SHARERS, PLACED = 32, 8, 1 << 15, 16, 128


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


@triton.jit
def add_found(
    sums,
    grad_output_ptr,
    ids_ptr,
    row,
    start,
    end,
    columns,
    dim,
    BLOCK_IDS: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
):
    """Add the cotangents of a row's ids among BLOCK_IDS ones from `start` on to sums, BLOCK_TERMS at a time."""
    at = start + tl.arange(0, BLOCK_IDS)
    found = (tl.load(ids_ptr + at, mask=at < end, other=-1).to(tl.int64) == row) & (at < end)
    numbers = tl.where(found, tl.cumsum(found.to(tl.int32), axis=0), 0)
    count = tl.max(numbers, axis=0)
    for tile in range(tl.cdiv(count, BLOCK_TERMS)):
        terms = tile * BLOCK_TERMS + 1 + tl.arange(0, BLOCK_TERMS)
        places = tl.sum(tl.where(numbers[None, :] == terms[:, None], at[None, :], 0), axis=1).to(tl.int64)
        sums += cotangents(grad_output_ptr, places, terms <= count, columns, dim).to(sums.dtype)
    return sums


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
    sums = tl.zeros((BLOCK_TERMS, BLOCK_COLS), COMPUTE)
    end = tl.where(row == padding_idx, 0, num_ids)
    sums = add_found(sums, grad_output_ptr, ids_ptr, row, 0, end, columns, dim, BLOCK_IDS, BLOCK_TERMS)
    total = tl.sum(sums, axis=0).to(grad_table_ptr.dtype.element_ty)
    tl.store(grad_table_ptr + row * dim + columns, total, mask=columns < dim)


@triton.jit(do_not_specialize=["num_ids", "vocab", "padding_idx"])
def embedding_places_kernel(
    ids_ptr,  # [num_ids]
    counts_ptr,  # [vocab + 1], of zeros: the ids of each row, and rows of more than FEW
    places_ptr,  # [vocab, FEW]
    many_ptr,  # [num_ids / (FEW + 1)]: rows of more than FEW ids
    num_ids,
    vocab,
    padding_idx,
    FEW: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
):
    # One program owns BLOCK_IDS ids. It writes their places, in any order.
    at = tl.program_id(0) * BLOCK_IDS + tl.arange(0, BLOCK_IDS)
    rows = tl.load(ids_ptr + at, mask=at < num_ids, other=-1).to(tl.int64)
    known = (rows >= 0) & (rows < vocab) & (rows != padding_idx)
    number = tl.atomic_add(counts_ptr + rows, 1, mask=known, sem="relaxed")
    tl.store(places_ptr + rows * FEW + number, at, mask=known & (number < FEW))
    exceeds = known & (number == FEW)
    slots = tl.atomic_add(counts_ptr + vocab + tl.zeros_like(rows), 1, mask=exceeds, sem="relaxed")
    tl.store(many_ptr + slots, rows, mask=exceeds)


@triton.jit(do_not_specialize=["num_ids", "vocab", "part"])
def embedding_backward_kernel(
    grad_output_ptr,  # [ids, dim]
    ids_ptr,  # [ids]
    counts_ptr,  # [vocab + 1]
    places_ptr,  # [vocab, FEW]
    many_ptr,  # [num_ids / (FEW + 1)]
    sums_ptr,  # [num_ids / (FEW + 1), PARTS, dim]
    ready_ptr,  # [blocks of columns, num_ids / (FEW + 1)], of zeros
    grad_table_ptr,  # [vocab, dim]
    num_ids,
    vocab,
    dim,
    part,
    COMPUTE: tl.constexpr,
    FEW: tl.constexpr,
    PARTS: tl.constexpr,
    SHARERS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_COLS columns of a row of at most FEW ids. The first SHARERS programs share the other rows:
    # each searches PARTS parts of `part` ids in turn, and the last one to finish adds up the sums of all parts.
    columns = (tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    inside = columns < dim
    if tl.program_id(0) >= SHARERS:
        row = (tl.program_id(0) - SHARERS).to(tl.int64)
        count = tl.load(counts_ptr + row)
        if count <= FEW:
            slots = tl.arange(0, FEW)
            places = tl.load(places_ptr + row * FEW + slots, mask=slots < count, other=num_ids)
            ranks = tl.sum((places[None, :] < places[:, None]).to(tl.int32), axis=1)
            sums = tl.zeros((BLOCK_TERMS, BLOCK_COLS), COMPUTE)
            for tile in range(tl.cdiv(count, BLOCK_TERMS)):
                terms = tile * BLOCK_TERMS + tl.arange(0, BLOCK_TERMS)
                chosen = (ranks[None, :] == terms[:, None]) & (terms < count)[:, None]
                chosen = tl.sum(tl.where(chosen, places[None, :], 0), axis=1).to(tl.int64)
                sums += cotangents(grad_output_ptr, chosen, terms < count, columns, dim).to(COMPUTE)
            total = tl.sum(sums, axis=0).to(grad_table_ptr.dtype.element_ty)
            tl.store(grad_table_ptr + row * dim + columns, total, mask=inside)
    else:
        for share in range(tl.program_id(0), tl.load(counts_ptr + vocab) * PARTS, SHARERS):
            number = share // PARTS
            first = (share - number * PARTS) * part
            row = tl.load(many_ptr + number).to(tl.int64)
            sums = tl.zeros((BLOCK_TERMS, BLOCK_COLS), COMPUTE)
            end = tl.minimum(first + part, num_ids)
            for start in range(first, end, BLOCK_IDS):
                sums = add_found(sums, grad_output_ptr, ids_ptr, row, start, end, columns, dim, BLOCK_IDS, BLOCK_TERMS)
            tl.store(sums_ptr + tl.cast(share, tl.int64) * dim + columns, tl.sum(sums, axis=0), mask=inside)
            tl.debug_barrier()
            counter_ptr = ready_ptr + tl.program_id(1) * (num_ids // (FEW + 1)) + number
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
                tl.debug_barrier()
                whole = tl.zeros((BLOCK_TERMS, BLOCK_COLS), COMPUTE)
                for start in range(0, PARTS, BLOCK_TERMS):
                    parts = tl.cast(number, tl.int64) * PARTS + start + tl.arange(0, BLOCK_TERMS)
                    from_ptr = sums_ptr + parts[:, None] * dim + columns[None, :]
                    # .cg reads from the L2 cache, which has the results of other multiprocessors.
                    whole += tl.load(from_ptr, mask=inside[None, :], other=0.0, cache_modifier=".cg")
                total = tl.sum(whole, axis=0).to(grad_table_ptr.dtype.element_ty)
                tl.store(grad_table_ptr + row * dim + columns, total, mask=inside)


def _launch(output: torch.Tensor, table: torch.Tensor, ids: torch.Tensor) -> None:
    num_ids, (vocab, dim) = ids.shape[0], table.shape
    block_cols = min(next_power_of_2(dim), MOST_COLS)
    block_ids = max(TILE_BYTES // table.element_size() // block_cols, 1)
    triton_launch.launch(
        embedding_forward_kernel,
        (cdiv(num_ids, block_ids),),
        (table, ids, output),
        (num_ids, vocab, dim, *table.stride()),
        INDEX=triton_launch.index_type(num_ids + block_ids),
        BLOCK_IDS=block_ids,
        BLOCK_COLS=block_cols,
    )


def _launch_backward(grad_table: torch.Tensor, grad_output: torch.Tensor, ids: torch.Tensor, padding_idx: int) -> None:
    (vocab, dim), num_ids, device = grad_table.shape, len(ids), ids.device
    block_cols = min(next_power_of_2(dim), SUM_COLS)
    across = cdiv(dim, block_cols)
    # Few registers where a row has few ids; and many warps where columns are loaded one by one.
    terms, warps = 4 if num_ids <= 4 * vocab else 8, block_cols // (WARP_COLS if dim % 16 == 0 else WARP_COLS // 2)
    options = {"COMPUTE": triton_launch.COMPUTE[grad_table.dtype], "BLOCK_TERMS": terms, "BLOCK_COLS": block_cols}
    options["num_warps"] = max(warps, 1)
    few, block_ids = FEW_IDS[device.type], next_power_of_2(min(num_ids, FEW_IDS[device.type]))
    if num_ids <= few:
        tensors, sizes = (grad_output, ids, grad_table), (num_ids, dim, padding_idx)
        grid = vocab, across
        triton_launch.launch(embedding_few_backward_kernel, grid, tensors, sizes, BLOCK_IDS=block_ids, **options)
        return
    most = num_ids // (FEW + 1)
    zeros = torch.zeros(vocab + 1 + across * most, dtype=torch.int32, device=device)
    counts, ready = zeros.split((vocab + 1, across * most))
    places, many = (torch.empty(size, dtype=torch.int32, device=device) for size in (vocab * FEW, most))
    triton_launch.launch(
        embedding_places_kernel,
        (cdiv(num_ids, PLACED),),
        (ids, counts, places, many),
        (num_ids, vocab, padding_idx),
        FEW=FEW,
        BLOCK_IDS=PLACED,
        num_warps=1,
    )
    parts = PARTS if num_ids <= MANY_IDS else FEW_PARTS
    compute = torch.promote_types(grad_table.dtype, torch.float32)
    sums = torch.empty((most * parts, dim), dtype=compute, device=device)
    sharers = min(most * parts, max(resident(device, SHARERS) // across, 1))
    triton_launch.launch(
        embedding_backward_kernel,
        (sharers + vocab, across),
        (grad_output, ids, counts, places, many, sums, ready, grad_table),
        (num_ids, vocab, dim, cdiv(num_ids, parts * block_ids) * block_ids),
        FEW=FEW,
        PARTS=parts,
        SHARERS=sharers,
        BLOCK_IDS=block_ids,
        **options,
    )


embedding = register("triton", _launch, _launch_backward)
