"""rms_norm in Triton: rows that fit in registers are read once, longer rows twice."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv, next_power_of_2
from fourfold.backends.strides import as_rows
from fourfold.backends.triton import launch as triton_launch

from ..triton_rows import NUMBERS_OF_ROWS, load_parameter, load_tile, load_whole_rows, row_offsets, store_tile
from .operators import register_rms_norm

# Longest rows that a program holds, in bytes of the compute type: forward, and backward, where there are two tensors
# and the sums of weight's gradient.
HELD_BYTES = 131072
HELD_BYTES_BACKWARD = 65536
# Columns of a piece of a longer row. Forward, a program of all threads takes more at once.
LOOPED_COLS = 4096
FORWARD_COLS = 16384
# Columns and rows of a tile, where the gradients of longer rows are written.
TILE_COLS = 256
TILE_ROWS = 8
# Partial sums, and columns of them, that a program of the second stage adds at once.
SUMMED_PARTIALS = 64
SUMMED_COLS = 32


class Plan(NamedTuple):
    """How the programs of a launch divide the rows.

    Attributes:
        looped: whether a row is read piece by piece, and twice, or at once.
        block_rows: rows that a program holds at once.
        block_cols: columns that it holds at once; all of them but where it is looped.
        num_warps: of a program.
    """

    looped: bool
    block_rows: int
    block_cols: int
    num_warps: int


def plan(cols: int, dtype: torch.dtype, held_bytes: int) -> Plan:
    """Choose how to walk through rows of `cols` columns, at least 1, given the bytes that a program holds."""
    size = 8 if dtype == torch.float64 else 4
    block_cols = next_power_of_2(cols)
    if block_cols * size > held_bytes:
        return Plan(True, 1, LOOPED_COLS * 4 // size, 8)
    # A thread holds a 32nd of a kilobyte of each tensor: enough in flight, no spills, few threads per sum.
    block_rows = max(1, 4096 // size // block_cols)
    # The longest rows take all threads. With half of them, each needs more registers than it has: backward, which then
    # spills, takes five times as long.
    per_warp = held_bytes // 32 if dtype.itemsize == 2 or block_cols * size == held_bytes else 4096
    return Plan(False, block_rows, block_cols, min(max(block_rows * block_cols * size // per_warp, 1), 32))


def forward_plan(cols: int, dtype: torch.dtype, least: int = 512) -> Plan:
    """Return how to walk through rows of `cols` columns forward.

    Args:
        cols: at least 1.
        dtype: of the rows.
        least: the least block, in columns, of rows that are read in pieces because Triton cannot read vectors of them.
    """
    by = plan(cols, dtype, HELD_BYTES)
    # Triton moves vectors only if it knows that a row is a multiple of 16 elements. Of single elements, more threads
    # have more on their way.
    if cols % (16 if by.block_cols >= 512 else 16 // dtype.itemsize):
        by = by._replace(num_warps=max(by.num_warps, 4))
    if dtype == torch.float64 or by.block_cols < least:
        return by
    if cols % 16 == 0:
        return Plan(True, 1, FORWARD_COLS, 32) if by.looped else by
    # Short pieces are on their way in turn. To read them twice, from a cache, takes less than to wait for a whole row.
    if by.block_cols <= 1024:
        return Plan(True, 1, by.block_cols, 1)
    block_cols = min(max(next_power_of_2(cols) // (8 if dtype.itemsize == 2 else 2), 1024), LOOPED_COLS)
    return Plan(True, 1, block_cols, 8 if block_cols == LOOPED_COLS else 4)


@triton.jit(do_not_specialize=NUMBERS_OF_ROWS)
def rms_norm_forward_kernel(
    x_ptr,  # [outer, inner, cols], strided
    weight_ptr,  # [cols], strided
    output_ptr,  # [outer * inner, cols]
    rstd_ptr,  # [outer * inner]
    num_rows,
    cols,
    inner,
    x_outer_stride,
    x_inner_stride,
    x_column_stride,
    weight_stride,
    eps: tl.float64,  # else Triton rounds it to float32
    LOOPED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_ROWS consecutive rows. It holds them, or reads them in pieces of BLOCK_COLS columns, twice.
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLS)
    if LOOPED:
        squares = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
        for start in range(0, cols, BLOCK_COLS):
            at = start + columns
            x = load_tile(x_ptr, rows, at, num_rows, cols, inner, x_outer_stride, x_inner_stride, x_column_stride)
            squares += x.to(COMPUTE) * x.to(COMPUTE)
    else:
        held = load_tile(x_ptr, rows, columns, num_rows, cols, inner, x_outer_stride, x_inner_stride, x_column_stride)
        held = held.to(COMPUTE)
        # Mask the squares. Else the product could be fused into the sum of a row in one lane and not in another, and
        # the lanes would store different numbers to the same place.
        squares = tl.where((columns < cols)[None, :], held * held, 0.0)
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / tl.full((), cols, COMPUTE) + tl.full((), eps, COMPUTE))
    tl.store(rstd_ptr + rows.to(tl.int64), rstd, mask=rows < num_rows)
    if LOOPED:
        pieces = tl.cdiv(cols, BLOCK_COLS)
        for piece in range(pieces):
            # Walk backwards, because what was read last is still in a cache.
            at = (pieces - 1 - piece) * BLOCK_COLS + columns
            x = load_tile(x_ptr, rows, at, num_rows, cols, inner, x_outer_stride, x_inner_stride, x_column_stride)
            scaled = x.to(COMPUTE) * rstd[:, None]
            weight = load_parameter(weight_ptr, at, cols, weight_stride, COMPUTE)
            store_tile(output_ptr, rows, at, num_rows, cols, scaled * weight[None, :])
    else:
        weight = load_parameter(weight_ptr, columns, cols, weight_stride, COMPUTE)
        store_tile(output_ptr, rows, columns, num_rows, cols, held * rstd[:, None] * weight[None, :])


@triton.jit(do_not_specialize=NUMBERS_OF_ROWS)
def rms_norm_backward_kernel(
    grad_output_ptr,  # [outer, inner, cols], strided
    x_ptr,  # [outer, inner, cols], strided
    weight_ptr,  # [cols], strided
    rstd_ptr,  # [outer * inner]
    products_ptr,  # [outer * inner]: row means of grad_normal * normal, where looped
    grad_x_ptr,  # [outer * inner, cols]
    partial_ptr,  # [programs along axis 1, cols]: the sums of weight's gradient over a program's rows
    added_ptr,  # [outer * inner, cols], where ADDED: another gradient of x, which is added before the sum is rounded
    num_rows,
    cols,
    inner,
    grad_output_outer_stride,
    grad_output_inner_stride,
    grad_output_column_stride,
    x_outer_stride,
    x_inner_stride,
    x_column_stride,
    weight_stride,
    NEEDS_X: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    ADDED: tl.constexpr,
    LOOPED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_COLS columns, all of them but where looped, of every num_programs(1)-th tile of rows.
    columns = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    weight = load_parameter(weight_ptr, columns, cols, weight_stride, COMPUTE)
    grad_weight = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
    for tile in range(tl.program_id(1), tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(1)):
        rows = tl.cast(tile, INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        x = load_tile(x_ptr, rows, columns, num_rows, cols, inner, x_outer_stride, x_inner_stride, x_column_stride)
        grad = load_tile(
            grad_output_ptr, rows, columns, num_rows, cols, inner,
            grad_output_outer_stride, grad_output_inner_stride, grad_output_column_stride,
        ).to(COMPUTE)  # fmt: skip
        rstd = tl.load(rstd_ptr + rows.to(tl.int64), mask=rows < num_rows, other=0.0)[:, None]
        normal = x.to(COMPUTE) * rstd
        if NEEDS_X:
            grad_normal = grad * weight[None, :]
            if LOOPED:
                product = tl.load(products_ptr + rows.to(tl.int64), mask=rows < num_rows, other=0.0)
            else:
                product = tl.sum(grad_normal * normal, axis=1) / tl.full((), cols, COMPUTE)
            grad_x = (grad_normal - normal * product[:, None]) * rstd
            if ADDED:
                grad_x += load_whole_rows(added_ptr, rows, columns, num_rows, cols).to(COMPUTE)
            store_tile(grad_x_ptr, rows, columns, num_rows, cols, grad_x)
        if NEEDS_WEIGHT:
            grad_weight += grad * normal
    if NEEDS_WEIGHT:
        at = tl.program_id(1).to(tl.int64) * cols + columns
        tl.store(partial_ptr + at, tl.sum(grad_weight, axis=0), mask=columns < cols)


@triton.jit
def rms_norm_backward_products_kernel(
    grad_output_ptr,  # [outer, inner, cols], strided
    x_ptr,  # [outer, inner, cols], strided
    weight_ptr,  # [cols], strided
    rstd_ptr,  # [outer * inner]
    products_ptr,  # [outer * inner]
    cols,
    inner,
    grad_output_outer_stride,
    grad_output_inner_stride,
    grad_output_column_stride,
    x_outer_stride,
    x_inner_stride,
    x_column_stride,
    weight_stride,
    COMPUTE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns one row, which it reads in pieces of BLOCK_COLS columns.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row_offsets(row, inner, x_outer_stride, x_inner_stride)
    grad_output_ptr += row_offsets(row, inner, grad_output_outer_stride, grad_output_inner_stride)
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros((BLOCK_COLS,), COMPUTE)
    for piece in range(tl.cdiv(cols, BLOCK_COLS)):
        columns = piece * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        wide = columns.to(tl.int64)
        x = tl.load(x_ptr + wide * x_column_stride, mask=columns < cols, other=0.0).to(COMPUTE)
        grad = tl.load(grad_output_ptr + wide * grad_output_column_stride, mask=columns < cols, other=0.0).to(COMPUTE)
        products += grad * load_parameter(weight_ptr, columns, cols, weight_stride, COMPUTE) * (x * rstd)
    tl.store(products_ptr + row, tl.sum(products, axis=0) / tl.full((), cols, COMPUTE))


@triton.jit
def rms_norm_sum_partials_kernel(
    partial_ptr,  # [partials, cols]
    grad_weight_ptr,  # [cols]
    partials,
    cols,
    COMPUTE: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_COLS columns.
    columns = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    sums = tl.zeros((BLOCK_PARTIALS, BLOCK_COLS), COMPUTE)
    for tile in range(tl.cdiv(partials, BLOCK_PARTIALS)):
        numbers = tile * BLOCK_PARTIALS + tl.arange(0, BLOCK_PARTIALS)
        at = numbers.to(tl.int64)[:, None] * cols + columns[None, :]
        sums += tl.load(partial_ptr + at, mask=(numbers < partials)[:, None] & (columns < cols)[None, :], other=0.0)
    total = tl.sum(sums, axis=0).to(grad_weight_ptr.dtype.element_ty)
    tl.store(grad_weight_ptr + columns, total, mask=columns < cols)


def _forward(output: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    num_rows, cols = rstd.shape[0], x.shape[-1]
    inner, (rows,) = as_rows(x)
    by = forward_plan(cols, x.dtype)
    triton_launch.launch(
        rms_norm_forward_kernel,
        (cdiv(num_rows, by.block_rows),),
        (rows.tensor, weight, output, rstd),
        (num_rows, cols, inner, *rows[1:], weight.stride(0), eps),
        LOOPED=by.looped,
        COMPUTE=triton_launch.COMPUTE[x.dtype],
        INDEX=triton_launch.index_type(num_rows + by.block_rows),
        BLOCK_ROWS=by.block_rows,
        BLOCK_COLS=by.block_cols,
        num_warps=by.num_warps,
    )


def launch_backward(
    grad_x: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    added: torch.Tensor | None = None,
) -> None:
    """Write the gradients that are needed. Where `added` is given, contiguous, it is added to the gradient of x."""
    num_rows, cols = rstd.shape[0], x.shape[-1]
    inner, (grad_rows, rows) = as_rows(grad_output, x)
    tensors = (grad_rows.tensor, rows.tensor, weight, rstd)
    strides = (inner, *grad_rows[1:], *rows[1:], weight.stride(0))
    compute = triton_launch.COMPUTE[x.dtype]
    by = plan(cols, x.dtype, HELD_BYTES_BACKWARD)
    products = rstd
    if by.looped and grad_x is not None:
        products = torch.empty_like(rstd)
        triton_launch.launch(
            rms_norm_backward_products_kernel,
            (num_rows,),
            (*tensors, products),
            (cols, *strides),
            COMPUTE=compute,
            BLOCK_COLS=by.block_cols,
            num_warps=by.num_warps,
        )
    block_rows, block_cols = (TILE_ROWS, TILE_COLS) if by.looped else (by.block_rows, by.block_cols)
    column_blocks, num_warps = cdiv(cols, block_cols), 4 if by.looped else by.num_warps
    # As many programs as there are registers for, and two at least, so that there are sums to add on the CPU too.
    most = triton_launch.multiprocessors(x.device) * max(16 // num_warps, 1)
    programs = min(cdiv(num_rows, block_rows), max(most // column_blocks, 2))
    partial = rstd.new_empty((programs if grad_weight is not None else 0, cols))
    triton_launch.launch(
        rms_norm_backward_kernel,
        (column_blocks, programs),
        (*tensors, products, rstd if grad_x is None else grad_x, partial, rstd if added is None else added),
        (num_rows, cols, *strides),
        NEEDS_X=grad_x is not None,
        NEEDS_WEIGHT=grad_weight is not None,
        ADDED=added is not None,
        LOOPED=by.looped,
        COMPUTE=compute,
        INDEX=triton_launch.index_type(num_rows + (programs + 1) * block_rows),
        BLOCK_ROWS=block_rows,
        BLOCK_COLS=block_cols,
        num_warps=num_warps,
    )
    if grad_weight is not None:
        summed_cols = min(next_power_of_2(cols), SUMMED_COLS)
        triton_launch.launch(
            rms_norm_sum_partials_kernel,
            (cdiv(cols, summed_cols),),
            (partial, grad_weight),
            (programs, cols),
            COMPUTE=compute,
            BLOCK_PARTIALS=min(next_power_of_2(programs), SUMMED_PARTIALS),
            BLOCK_COLS=summed_cols,
        )


rms_norm = register_rms_norm("triton", _forward, launch_backward)
