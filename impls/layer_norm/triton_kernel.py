"""layer_norm in Triton, and norms like it: without a mean and a bias, or of the sum of x and a residual.

Rows that fit in registers are read once, longer rows twice.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv, next_power_of_2
from fourfold.backends.strides import Rows, as_rows
from fourfold.backends.triton import launch as triton_launch

from ..triton_rows import ANY_NUMBER_OF_ROWS, load_parameter, load_tile, load_whole_rows, row_offsets, store_tile
from .operators import Needs, register_layer_norm

# Longest rows that a program holds, in bytes of the compute type: forward; and backward, with the sums of columns.
HELD_BYTES = 131072
HELD_BYTES_BACKWARD = 65536
# Bytes of the compute type per piece of a looped row. Forward, a program of many threads takes more columns at once, by
# the bytes of a number: some vectors of 16 bytes of each thread.
LOOPED_BYTES = 16384
FORWARD_COLS, VECTOR_BYTES = {2: 16384, 4: 32768}, 16
# Of a looped row backward, where a program has several rows.
COLUMN_BYTES = 1024
# Of the second stage: columns of a program, partial sums that it adds at once, and as many programs as any GPU needs.
SUMMED_COLS = 32
SUMMED_PARTIALS = 64
SUMMING_PROGRAMS = 512
# Backward, further programs of the same launch sum the columns of so few rows, DIRECT_COLS columns a program. On the
# CPU fewer rows are few, so that both ways run.
FEW_ROWS, FEW_ROWS_ON_CPU, DIRECT_COLS = 512, 8, 8
# Bytes that one transfer from memory to the L2 cache brings, and that the lanes of a warp load at once.
LINE_BYTES, WARP_BYTES = 128, 512


class Plan(NamedTuple):
    """How the programs of a launch divide the rows.

    Attributes:
        looped: whether a row is read piece by piece, and twice, or at once.
        block_rows: rows that a program holds at once.
        block_cols: columns that it holds at once; all of them but where it is looped.
        num_warps: of a program.
        programs: for each multiprocessor, backward: they sum the gradients of weight and bias over the rows they own.
        registers: the most registers of a thread, so that this many programs run at once; None: Triton chooses.
        steered: forward, where looped: whether cache policies favour data that are read twice over data that are read
            or written once.
        kept: backward, where looped: whether a program reads its rows whole, in pieces of `block_cols` columns, up to
            `block_rows` of them at once, and holds the sums of all columns.
        ahead: backward: whether a program loads its next rows before it sums these.
    """

    looped: bool
    block_rows: int
    block_cols: int
    num_warps: int
    programs: int = 0
    registers: int | None = None
    steered: bool = False
    kept: bool = False
    ahead: bool = False


def forward_plan(cols: int, dtype: torch.dtype, centred: bool, added: bool) -> Plan:
    """Choose how forward walks through rows of `cols` columns, at least 1, which are centred, or sums, or neither."""
    size, half = max(dtype.itemsize, 4), dtype.itemsize == 2
    block_cols = next_power_of_2(cols)
    # Triton moves single elements unless it knows that a row is a multiple of 16. Short pieces are on their way in
    # turn: to read them twice, from a cache, takes less than to wait for a whole row.
    if cols % 16 and size == 4 and block_cols >= (4096 if centred else 2048 if added else 512):
        if centred:
            return Plan(True, 1, 1024, 2) if block_cols <= 8192 else Plan(True, 1, 2048, 4)
        if block_cols <= 1024:
            return Plan(True, 1, block_cols, 1)
        return Plan(True, 1, min(max(block_cols // (16 if half else 4), 512 if half else 1024), 2048), 4)
    if block_cols * size > HELD_BYTES:
        if size == 8:
            return Plan(True, 1, LOOPED_BYTES // size, 8)
        return Plan(True, 1, FORWARD_COLS[dtype.itemsize], 16 if half else 32, steered=not added)
    # A thread holds 128 bytes of data, or 64 of the longest rows: enough in flight, no spills, few threads per sum.
    bytes_per_warp = 2048 if size == 4 and block_cols >= 16384 and not added else 4096
    per_warp, fewest = (2048, 2) if half and centred else (bytes_per_warp // size, 1)
    if cols % (16 if block_cols >= 512 else 16 // dtype.itemsize):
        # Of single elements, more threads have more on their way.
        per_warp, fewest = 2048, 2 if added and not centred else 4
    block_rows = max(1, per_warp // block_cols)
    return Plan(False, block_rows, block_cols, min(max(block_rows * block_cols // per_warp, fewest), 32))


def backward_plan(cols: int, dtype: torch.dtype, centred: bool, added: bool) -> Plan:
    """Choose how backward walks through rows of `cols` columns, at least 1, centred or not, and with `added` or not."""
    # Each column takes registers for x, grad_output, the next row of both, weight, and two sums. Spilling costs more
    # than reading twice. The table gives the elements per warp, how many warps then fit on a multiprocessor, and the
    # elements of a program that has several rows: they wait less often for their sums.
    per_warp, warps, elements = {2: (512, 16, 2048), 4: (1024, 8, 4096), 8: (256, 8, 1024)}[dtype.itemsize]
    size, block_cols = max(dtype.itemsize, 4), next_power_of_2(cols)
    if block_cols * size > HELD_BYTES_BACKWARD:
        return Plan(True, 8 if dtype.itemsize == 2 else 4, COLUMN_BYTES // size, 8, 4)
    if block_cols > per_warp * warps:
        # The sums take half of a multiprocessor's registers. A thread holds one 16-byte vector of a piece. With half
        # types, several pieces at once are in flight while a row's means are summed.
        pieces = 1 if dtype.itemsize > 2 else 2 if centred and not added else 4
        return Plan(True, pieces, 16 * 32 * 16 // dtype.itemsize, 16, 1, 128, kept=True)
    if centred and cols % 16 and size == 4 and block_cols == 8192:
        return Plan(False, 1, block_cols, 8, 1, 255)  # no registers to load single elements ahead
    if added and cols % 16 and dtype.itemsize == 4 and block_cols <= 1024:
        per_warp, elements = 512, 1024  # of single elements, as forward
    block_rows = max(1, elements // block_cols)
    num_warps = max(block_rows * block_cols // per_warp, 1)
    # Single elements of half types need registers for their addresses, which leaves too few to load rows ahead.
    ahead = dtype.itemsize > 2 or cols % 16 == 0
    return Plan(False, block_rows, block_cols, num_warps, warps // num_warps, min(2048 // warps, 255), ahead=ahead)


def plan_for_rows(plan: Plan, num_rows: int, least: int, cols: int, *tensors: Rows) -> Plan:
    """Return a plan with fewer rows in a program if a launch had less than the least number of programs.

    A row has the same bits in both: as many warps share it, and each lane holds the same columns of it.
    """
    row_bytes = plan.block_cols * tensors[0].tensor.element_size()
    if plan.looped or row_bytes < WARP_BYTES or cdiv(num_rows, plan.block_rows) >= least:
        return plan
    # Triton gives a row to as many warps as its vectors of 16 bytes have lanes for.
    sharing = min(plan.num_warps, row_bytes // WARP_BYTES)
    if plan.num_warps > 1:
        starts = (n for rows in tensors for n in (rows.tensor.data_ptr(), *rows[1:3]))
        if any(rows.column_stride != 1 for rows in tensors) or any(n % 16 for n in (cols, *starts)):
            return plan
    while plan.block_rows > 1 and cdiv(num_rows, plan.block_rows) < least:
        plan = plan._replace(block_rows=plan.block_rows // 2, num_warps=max(plan.num_warps // 2, sharing))
    return plan


def summing_blocks(cols: int, partials: int) -> tuple[int, int]:
    """Return partial sums, and columns of them, that a program of backward's second stage adds at once."""
    most = SUMMED_PARTIALS * SUMMED_COLS
    # Of long rows more columns, in exchange for partial sums, of which there are few then.
    enough = max(SUMMED_COLS, next_power_of_2(cdiv(cols, SUMMING_PROGRAMS)))
    block_cols = min(next_power_of_2(cols), enough, most)
    return min(next_power_of_2(partials), SUMMED_PARTIALS, most // block_cols), block_cols


@triton.jit
def load_sum(
    x_ptr, residual_ptr, summed_ptr, rows, columns, num_rows, cols, inner, x_outer_stride, x_inner_stride,
    x_column_stride, residual_outer_stride, residual_inner_stride, residual_column_stride,
    ADDED: tl.constexpr, COMPUTE: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Load some rows and columns of x. Where ADDED, return and store their sum with the residual."""
    x = load_tile(
        x_ptr, rows, columns, num_rows, cols, inner, x_outer_stride, x_inner_stride, x_column_stride, POLICY
    )  # fmt: skip
    if ADDED:
        residual = load_tile(
            residual_ptr, rows, columns, num_rows, cols, inner,
            residual_outer_stride, residual_inner_stride, residual_column_stride, POLICY,
        )  # fmt: skip
        # What is normalized is what is stored: the rounded sum.
        x = (x.to(COMPUTE) + residual.to(COMPUTE)).to(summed_ptr.dtype.element_ty)
        store_tile(summed_ptr, rows, columns, num_rows, cols, x, "")
    return x.to(COMPUTE)


@triton.jit
def store_output(
    output_ptr, weight_ptr, bias_ptr, rows, columns, num_rows, cols, weight_stride, bias_stride, normal,
    CENTRED: tl.constexpr, COMPUTE: tl.constexpr, MODIFIER: tl.constexpr,
):  # fmt: skip
    """Store some rows and columns of the output."""
    output = normal * load_parameter(weight_ptr, columns, cols, weight_stride, COMPUTE)[None, :]
    if CENTRED:
        output += load_parameter(bias_ptr, columns, cols, bias_stride, COMPUTE)[None, :]
    store_tile(output_ptr, rows, columns, num_rows, cols, output, MODIFIER)


@triton.jit
def store_statistics(mean_ptr, rstd_ptr, rows, num_rows, mean, rstd, CENTRED: tl.constexpr):
    """Store the means of rows, where CENTRED, and their reciprocal deviations."""
    if CENTRED:
        tl.store(mean_ptr + rows.to(tl.int64), mean, mask=rows < num_rows)
    tl.store(rstd_ptr + rows.to(tl.int64), rstd, mask=rows < num_rows)


@triton.jit(**ANY_NUMBER_OF_ROWS)
def norm_forward_kernel(
    x_ptr,  # [outer, inner, cols], strided
    residual_ptr,  # [outer, inner, cols], strided, where ADDED
    weight_ptr,  # [cols], strided
    bias_ptr,  # [cols], strided, where CENTRED
    output_ptr,  # [outer * inner, cols]
    summed_ptr,  # [outer * inner, cols], where ADDED: x + residual
    mean_ptr,  # [outer * inner], where CENTRED
    rstd_ptr,  # [outer * inner]
    num_rows,
    cols,
    inner,
    x_outer_stride,
    x_inner_stride,
    x_column_stride,
    residual_outer_stride,
    residual_inner_stride,
    residual_column_stride,
    weight_stride,
    bias_stride,
    eps: tl.float64,  # else Triton rounds it to float32
    CENTRED: tl.constexpr,
    ADDED: tl.constexpr,
    LOOPED: tl.constexpr,
    STEERED: tl.constexpr,
    LANES: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_ROWS consecutive rows. It holds them, or reads them in pieces of BLOCK_COLS columns, twice.
    AGAIN: tl.constexpr = "evict_last" if STEERED else ""
    ONCE: tl.constexpr = "evict_first" if STEERED else ""
    WRITTEN: tl.constexpr = ".cs" if STEERED else ""
    if LOOPED:
        tl.assume(tl.program_id(0) < num_rows)  # so that no element asks whether its row exists
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLS)
    num = tl.full((), cols, COMPUTE)
    mean = tl.zeros((BLOCK_ROWS,), COMPUTE)
    held = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
    squares = held
    if LOOPED:
        squares = tl.zeros((BLOCK_ROWS,) if CENTRED else (BLOCK_ROWS, LANES), COMPUTE)
    for start in range(0, cols if LOOPED else 1, BLOCK_COLS):
        at = start + columns
        held = load_sum(
            x_ptr, residual_ptr, summed_ptr, rows, at, num_rows, cols, inner, x_outer_stride, x_inner_stride,
            x_column_stride, residual_outer_stride, residual_inner_stride, residual_column_stride, ADDED, COMPUTE,
            AGAIN,
        )  # fmt: skip
        if LOOPED and CENTRED:
            before = tl.full((), start, COMPUTE)
            piece_num = tl.full((), tl.minimum(cols - start, BLOCK_COLS), COMPUTE)
            piece_mean = tl.sum(held, axis=1) / piece_num
            centred = tl.where((at < cols)[None, :], held - piece_mean[:, None], 0.0)
            # Merge the squared deviations of two samples: Chan, Golub, LeVeque 1983, (2.1).
            share = piece_num / (before + piece_num)
            apart = piece_mean - mean
            mean += apart * share
            # Keep this order of factors: before the first piece, apart is the piece's mean, whose square may overflow.
            squares += tl.sum(centred * centred, axis=1) + before * apart * (apart * share)
        elif LOOPED:
            # Each thread adds up its own columns.
            squares += tl.sum(tl.reshape(held * held, (BLOCK_ROWS, BLOCK_COLS // LANES, LANES)), axis=1)
        else:
            if CENTRED:
                mean = tl.sum(held, axis=1) / num
            held -= mean[:, None]
            # Mask the squares. Else the product could be fused into the sum of a row in one lane and not in another,
            # and the lanes would store different numbers to the same place.
            squares = tl.where((at < cols)[None, :], held * held, 0.0)
    if not (LOOPED and CENTRED):
        squares = tl.sum(squares, axis=1)
    rstd = tl.rsqrt(squares / num + tl.full((), eps, COMPUTE))
    if LOOPED:
        store_statistics(mean_ptr, rstd_ptr, rows, num_rows, mean, rstd, CENTRED)
        if ADDED:
            tl.debug_barrier()  # other threads than those that stored the sums may read them
        pieces = tl.cdiv(cols, BLOCK_COLS)
        for piece in range(pieces):
            # Walk backwards, because what was read or stored last is still in a cache.
            at = (pieces - 1 - piece) * BLOCK_COLS + columns
            if ADDED:
                x = load_whole_rows(summed_ptr, rows, at, num_rows, cols)
            else:
                x = load_tile(
                    x_ptr, rows, at, num_rows, cols, inner, x_outer_stride, x_inner_stride, x_column_stride, ONCE
                )  # fmt: skip
            normal = (x.to(COMPUTE) - mean[:, None]) * rstd[:, None]
            store_output(
                output_ptr, weight_ptr, bias_ptr, rows, at, num_rows, cols, weight_stride, bias_stride, normal,
                CENTRED, COMPUTE, WRITTEN,
            )  # fmt: skip
    else:
        store_output(
            output_ptr, weight_ptr, bias_ptr, rows, columns, num_rows, cols, weight_stride, bias_stride,
            held * rstd[:, None], CENTRED, COMPUTE, WRITTEN,
        )  # fmt: skip
        store_statistics(mean_ptr, rstd_ptr, rows, num_rows, mean, rstd, CENTRED)


@triton.jit
def load_rows(
    grad_output_ptr, x_ptr, mean_ptr, rstd_ptr, rows, columns, num_rows, cols, inner,
    grad_output_outer_stride, grad_output_inner_stride, grad_output_column_stride,
    x_outer_stride, x_inner_stride, x_column_stride, CENTRED: tl.constexpr,
):  # fmt: skip
    """Load some rows and columns of grad_output and x, and the rows' means, 0 where not CENTRED, and deviations."""
    x = load_tile(x_ptr, rows, columns, num_rows, cols, inner, x_outer_stride, x_inner_stride, x_column_stride, "")
    grad = load_tile(
        grad_output_ptr, rows, columns, num_rows, cols, inner,
        grad_output_outer_stride, grad_output_inner_stride, grad_output_column_stride, "",
    )  # fmt: skip
    rstd = tl.load(rstd_ptr + rows.to(tl.int64), mask=rows < num_rows, other=0.0)
    mean = tl.zeros_like(rstd)
    if CENTRED:
        mean = tl.load(mean_ptr + rows.to(tl.int64), mask=rows < num_rows, other=0.0)
    return grad, x, mean, rstd


@triton.jit
def sum_columns(
    grad_output_ptr, x_ptr, mean_ptr, rstd_ptr, grad_weight_ptr, grad_bias_ptr, block, num_rows, cols, inner,
    grad_output_outer_stride, grad_output_inner_stride, grad_output_column_stride,
    x_outer_stride, x_inner_stride, x_column_stride, CENTRED: tl.constexpr, COMPUTE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of weight and, where CENTRED, bias for a block of COLS columns: the sums over all rows."""
    AT_ONCE: tl.constexpr = 128
    columns = block * COLS + tl.arange(0, COLS)
    grad_weight = tl.zeros((AT_ONCE, COLS), COMPUTE)
    grad_bias = tl.zeros((AT_ONCE, COLS), COMPUTE)
    for start in range(0, num_rows, AT_ONCE):
        rows = start + tl.arange(0, AT_ONCE)
        grad, x, mean, rstd = load_rows(
            grad_output_ptr, x_ptr, mean_ptr, rstd_ptr, rows, columns, num_rows, cols, inner,
            grad_output_outer_stride, grad_output_inner_stride, grad_output_column_stride,
            x_outer_stride, x_inner_stride, x_column_stride, CENTRED,
        )  # fmt: skip
        grad_weight += grad.to(COMPUTE) * ((x.to(COMPUTE) - mean[:, None]) * rstd[:, None])
        grad_bias += grad.to(COMPUTE)
    total = tl.sum(grad_weight, axis=0).to(grad_weight_ptr.dtype.element_ty)
    tl.store(grad_weight_ptr + columns, total, mask=columns < cols)
    if CENTRED:
        total = tl.sum(grad_bias, axis=0).to(grad_bias_ptr.dtype.element_ty)
        tl.store(grad_bias_ptr + columns, total, mask=columns < cols)


@triton.jit(**ANY_NUMBER_OF_ROWS)
def norm_backward_kernel(
    grad_output_ptr,  # [outer, inner, cols], strided
    x_ptr,  # [outer, inner, cols], strided
    weight_ptr,  # [cols], strided
    mean_ptr,  # [outer * inner], where CENTRED
    rstd_ptr,  # [outer * inner]
    added_ptr,  # [outer * inner, cols], where ADDED: another gradient of x, which is added before the sum is rounded
    means_ptr,  # [2, outer * inner], where LOOPED: row means of grad_normal * normal, and of grad_normal
    grad_x_ptr,  # [outer * inner, cols]
    partial_ptr,  # [2, programs along axis 1, cols]: the sums of weight's and bias's gradients over a program's rows
    grad_weight_ptr,  # [cols], where DIRECT
    grad_bias_ptr,  # [cols], where DIRECT and CENTRED
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
    NEEDS_PARAMETERS: tl.constexpr,
    CENTRED: tl.constexpr,
    ADDED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    DIRECT: tl.constexpr,
    LOOPED: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_COLS columns, all of them but where looped, of every num_programs(1)-th tile of rows. Where
    # DIRECT, a tile has a program, and the other programs sum DIRECT columns of all rows at the same time.
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    columns = tl.arange(0, BLOCK_COLS)
    if LOOPED:
        columns += tl.program_id(0) * BLOCK_COLS
    num = tl.full((), cols, COMPUTE)
    weight = load_parameter(weight_ptr, columns, cols, weight_stride, COMPUTE)
    grad_weight = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
    grad_bias = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)

    rows = program.to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if AHEAD:
        loaded = load_rows(
            grad_output_ptr, x_ptr, mean_ptr, rstd_ptr, rows, columns, num_rows, cols, inner,
            grad_output_outer_stride, grad_output_inner_stride, grad_output_column_stride,
            x_outer_stride, x_inner_stride, x_column_stride, CENTRED,
        )  # fmt: skip
    for _ in range(program, tl.cdiv(num_rows, BLOCK_ROWS), programs):
        if not AHEAD:
            loaded = load_rows(
                grad_output_ptr, x_ptr, mean_ptr, rstd_ptr, rows, columns, num_rows, cols, inner,
                grad_output_outer_stride, grad_output_inner_stride, grad_output_column_stride,
                x_outer_stride, x_inner_stride, x_column_stride, CENTRED,
            )  # fmt: skip
        grad, x, mean, rstd = loaded
        grad, x = grad.to(COMPUTE), x.to(COMPUTE)
        next_rows = rows + programs * BLOCK_ROWS
        if AHEAD:
            # Load the next tile while this one is summed and stored.
            loaded = load_rows(
                grad_output_ptr, x_ptr, mean_ptr, rstd_ptr, next_rows, columns, num_rows, cols, inner,
                grad_output_outer_stride, grad_output_inner_stride, grad_output_column_stride,
                x_outer_stride, x_inner_stride, x_column_stride, CENTRED,
            )  # fmt: skip
        normal = (x - mean[:, None]) * rstd[:, None]
        if NEEDS_X:
            at = rows.to(tl.int64)
            grad_normal = grad * weight[None, :]
            if CENTRED and BLOCK_COLS <= 16:
                # The zero is fused with the product, which rounds it. Without the zero, the subtraction of the mean
                # would be fused with it. That leaves the product's rounding error where all products are equal, as a
                # single one is, and the gradient is 0. The mean of many products has an error of its own, and keeping
                # the rounded products in registers costs up to a sixth of the time.
                grad_normal += 0.0
            mean_grad = tl.zeros_like(rstd)
            if LOOPED:
                if CENTRED:
                    mean_grad = tl.load(means_ptr + num_rows + at, mask=rows < num_rows, other=0.0)
                mean_product = tl.load(means_ptr + at, mask=rows < num_rows, other=0.0)
            else:
                if CENTRED:
                    mean_grad = tl.sum(grad_normal, axis=1) / num
                mean_product = tl.sum(grad_normal * normal, axis=1) / num
            grad_x = (grad_normal - mean_grad[:, None] - normal * mean_product[:, None]) * rstd[:, None]
            if ADDED:
                grad_x += load_whole_rows(added_ptr, rows, columns, num_rows, cols).to(COMPUTE)
            store_tile(grad_x_ptr, rows, columns, num_rows, cols, grad_x, "")
        if NEEDS_PARAMETERS and not DIRECT:
            grad_weight += grad * normal
            if CENTRED:
                grad_bias += grad
        rows = next_rows
    if DIRECT:
        tiles = tl.cdiv(num_rows, BLOCK_ROWS)
        if program >= tiles:
            sum_columns(
                grad_output_ptr, x_ptr, mean_ptr, rstd_ptr, grad_weight_ptr, grad_bias_ptr, program - tiles,
                num_rows, cols, inner, grad_output_outer_stride, grad_output_inner_stride, grad_output_column_stride,
                x_outer_stride, x_inner_stride, x_column_stride, CENTRED, COMPUTE, DIRECT,
            )  # fmt: skip
    elif NEEDS_PARAMETERS:
        at = program.to(tl.int64) * cols + columns
        tl.store(partial_ptr + at, tl.sum(grad_weight, axis=0), mask=columns < cols)
        if CENTRED:
            tl.store(partial_ptr + programs.to(tl.int64) * cols + at, tl.sum(grad_bias, axis=0), mask=columns < cols)


@triton.jit
def load_piece(ptr, start: tl.constexpr, lanes, cols, stride, COMPUTE: tl.constexpr):
    """Load the columns of a row from a constant `start` on, 0 outside the row, for the last time."""
    at = ptr + tl.cast(start, tl.int64) * stride + lanes.to(tl.int64) * stride
    return tl.load(at, mask=start + lanes < cols, other=0.0, eviction_policy="evict_first").to(COMPUTE)


@triton.jit
def fetch_row(ptr, columns, cols, stride):
    """Prefetch a row into the L2 cache, with one column of each cache line."""
    at = ptr + tl.minimum(columns, cols - 1).to(tl.int64) * stride
    # The assembly must produce a value.
    fetch: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(fetch, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def with_added(sums, number: tl.constexpr, values):
    """Return a tuple of sums with values added to one of them."""
    # Triton does not support unpacking a tuple with a star.
    return sums[:number] + (sums[number] + values,) + sums[number + 1 :]  # noqa: RUF005


@triton.jit(**ANY_NUMBER_OF_ROWS)
def norm_backward_kept_kernel(
    grad_output_ptr,  # [outer, inner, cols], strided
    x_ptr,  # [outer, inner, cols], strided
    weight_ptr,  # [cols], strided
    mean_ptr,  # [outer * inner], where CENTRED
    rstd_ptr,  # [outer * inner]
    added_ptr,  # [outer * inner, cols], where ADDED: another gradient of x, which is added before the sum is rounded
    grad_x_ptr,  # [outer * inner, cols]
    partial_ptr,  # [2, programs, cols]: the sums of weight's and bias's gradients over a program's rows
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
    NEEDS_PARAMETERS: tl.constexpr,
    CENTRED: tl.constexpr,
    ADDED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    FETCH: tl.constexpr,
    LINES: tl.constexpr,
    LINE_COLS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
):
    # One program owns every num_programs-th row, which it reads in pieces of LANES columns.
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    lanes = tl.arange(0, LANES)
    lines = tl.arange(0, LINES) * LINE_COLS
    tile = (tl.arange(0, AT_ONCE) * LANES)[:, None] + lanes[None, :]
    wide = tile.to(tl.int64)
    num = tl.full((), cols, COMPUTE)
    # One tensor per piece. A single tensor of all pieces would have another layout than the loaded data, which would
    # then have to pass through shared memory.
    grad_weight = (tl.zeros((LANES,), COMPUTE),) * PIECES
    grad_bias = (tl.zeros((LANES,), COMPUTE),) * PIECES
    for number in range(program, num_rows, programs):
        row = tl.cast(number, INDEX)
        x_row = x_ptr + row_offsets(row, inner, x_outer_stride, x_inner_stride)
        grad_row = grad_output_ptr + row_offsets(row, inner, grad_output_outer_stride, grad_output_inner_stride)
        whole_row = row.to(tl.int64) * cols
        mean = tl.load(mean_ptr + row) if CENTRED else 0.0
        rstd = tl.load(rstd_ptr + row)
        if NEEDS_X:
            sums = tl.zeros((LANES,), COMPUTE)
            products = tl.zeros((LANES,), COMPUTE)
            # Not unrolled: all pieces would be loaded at once, and the sums would be spilled to make room.
            for start in range(0, cols, AT_ONCE * LANES):
                here = start + tile < cols
                first = tl.cast(start, tl.int64)
                x = tl.load(x_row + first * x_column_stride + wide * x_column_stride, mask=here, other=0.0).to(COMPUTE)
                grad_at = grad_row + first * grad_output_column_stride + wide * grad_output_column_stride
                grad = tl.load(grad_at, mask=here, other=0.0).to(COMPUTE)
                weight_at = weight_ptr + first * weight_stride + wide * weight_stride
                weight = tl.load(weight_at, mask=here, other=0.0, eviction_policy="evict_last").to(COMPUTE)
                grad_normal = grad * weight
                if CENTRED:
                    sums += tl.sum(grad_normal, axis=0)
                products += tl.sum(grad_normal * ((x - mean) * rstd), axis=0)
            mean_grad = tl.sum(sums, axis=0) / num
            mean_product = tl.sum(products, axis=0) / num
        if FETCH:
            # A prefetch occupies no register, so all of the next row is in flight while this one comes from a cache.
            later = tl.minimum(row + programs, num_rows - 1)
            later_x = x_ptr + row_offsets(later, inner, x_outer_stride, x_inner_stride)
            later_grad = grad_output_ptr + row_offsets(later, inner, grad_output_outer_stride, grad_output_inner_stride)
            fetch_row(later_x, lines, cols, x_column_stride)
            fetch_row(later_grad, lines, cols, grad_output_column_stride)
            if ADDED:
                fetch_row(added_ptr + later.to(tl.int64) * cols, lines, cols, 1)
        # Walk backwards, because what was read last is still in the nearest cache.
        for back in tl.static_range(PIECES):
            start = (PIECES - 1 - back) * LANES
            columns = start + lanes
            x = load_piece(x_row, start, lanes, cols, x_column_stride, COMPUTE)
            grad = load_piece(grad_row, start, lanes, cols, grad_output_column_stride, COMPUTE)
            normal = (x - mean) * rstd
            if NEEDS_X:
                weight = load_parameter(weight_ptr, columns, cols, weight_stride, COMPUTE)
                grad_x = (grad * weight - mean_grad - normal * mean_product) * rstd
                if ADDED:
                    grad_x += load_piece(added_ptr + whole_row, start, lanes, cols, 1, COMPUTE)
                at = whole_row + tl.cast(start, tl.int64) + lanes.to(tl.int64)
                tl.store(
                    grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=columns < cols, cache_modifier=".cs"
                )
            if NEEDS_PARAMETERS:
                grad_weight = with_added(grad_weight, PIECES - 1 - back, grad * normal)
                if CENTRED:
                    grad_bias = with_added(grad_bias, PIECES - 1 - back, grad)
    if NEEDS_PARAMETERS:
        for piece in tl.static_range(PIECES):
            columns = piece * LANES + lanes
            at = program.to(tl.int64) * cols + columns
            tl.store(partial_ptr + at, grad_weight[piece], mask=columns < cols)
            if CENTRED:
                tl.store(partial_ptr + programs.to(tl.int64) * cols + at, grad_bias[piece], mask=columns < cols)


@triton.jit(**ANY_NUMBER_OF_ROWS)
def norm_backward_means_kernel(
    grad_output_ptr,  # [outer, inner, cols], strided
    x_ptr,  # [outer, inner, cols], strided
    weight_ptr,  # [cols], strided
    mean_ptr,  # [outer * inner], where CENTRED
    rstd_ptr,  # [outer * inner]
    means_ptr,  # [2, outer * inner]: row means of grad_normal * normal, and of grad_normal where CENTRED
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
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns one row, which it reads in pieces of BLOCK_COLS columns.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row_offsets(row, inner, x_outer_stride, x_inner_stride)
    grad_output_ptr += row_offsets(row, inner, grad_output_outer_stride, grad_output_inner_stride)
    mean = tl.load(mean_ptr + row) if CENTRED else 0.0
    rstd = tl.load(rstd_ptr + row)
    num = tl.full((), cols, COMPUTE)
    sums = tl.zeros((BLOCK_COLS,), COMPUTE)
    products = tl.zeros((BLOCK_COLS,), COMPUTE)
    for piece in range(tl.cdiv(cols, BLOCK_COLS)):
        columns = piece * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        wide = columns.to(tl.int64)
        x = tl.load(x_ptr + wide * x_column_stride, mask=columns < cols, other=0.0).to(COMPUTE)
        grad = tl.load(grad_output_ptr + wide * grad_output_column_stride, mask=columns < cols, other=0.0).to(COMPUTE)
        grad_normal = grad * load_parameter(weight_ptr, columns, cols, weight_stride, COMPUTE)
        sums += grad_normal
        products += grad_normal * ((x - mean) * rstd)
    tl.store(means_ptr + row, tl.sum(products, axis=0) / num)
    if CENTRED:
        tl.store(means_ptr + tl.cast(num_rows, tl.int64) + row, tl.sum(sums, axis=0) / num)


@triton.jit
def norm_sum_partials_kernel(
    partial_ptr,  # [2, partials, cols]
    grad_weight_ptr,  # [cols]
    grad_bias_ptr,  # [cols]
    partials,
    cols,
    NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_COLS columns.
    columns = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    grad_weight = tl.zeros((BLOCK_PARTIALS, BLOCK_COLS), COMPUTE)
    grad_bias = tl.zeros((BLOCK_PARTIALS, BLOCK_COLS), COMPUTE)
    for tile in range(tl.cdiv(partials, BLOCK_PARTIALS)):
        numbers = tile * BLOCK_PARTIALS + tl.arange(0, BLOCK_PARTIALS)
        mask = (numbers < partials)[:, None] & (columns < cols)[None, :]
        at = numbers.to(tl.int64)[:, None] * cols + columns[None, :]
        if NEEDS_WEIGHT:
            grad_weight += tl.load(partial_ptr + at, mask=mask, other=0.0)
        if NEEDS_BIAS:
            grad_bias += tl.load(partial_ptr + tl.cast(partials, tl.int64) * cols + at, mask=mask, other=0.0)
    if NEEDS_WEIGHT:
        total = tl.sum(grad_weight, axis=0).to(grad_weight_ptr.dtype.element_ty)
        tl.store(grad_weight_ptr + columns, total, mask=columns < cols)
    if NEEDS_BIAS:
        total = tl.sum(grad_bias, axis=0).to(grad_bias_ptr.dtype.element_ty)
        tl.store(grad_bias_ptr + columns, total, mask=columns < cols)


def launch_forward(
    output: torch.Tensor,
    summed: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> None:
    """Write the first four: the norm of x, or of ``summed = x + residual``. The rows must not be empty.

    If mean and bias are None, the rows are not centred. If summed and residual are None, nothing is added to x.
    """
    num_rows, cols = rstd.shape[0], x.shape[-1]
    inner, views = as_rows(x) if residual is None else as_rows(x, residual)
    rows, residual_rows = views[0], views[-1]
    bias = weight if bias is None else bias
    plan = forward_plan(cols, x.dtype, mean is not None, residual is not None)
    # With two sums, a program of two rows takes longer than two programs.
    least = triton_launch.multiprocessors(x.device) // (3 if mean is None else 1)
    plan = plan_for_rows(plan, num_rows, least, cols, *views)
    # Not None, with which `launch` does not recognize a launch.
    optional = (output if summed is None else summed, rstd if mean is None else mean)
    triton_launch.launch(
        norm_forward_kernel,
        (cdiv(num_rows, plan.block_rows),),
        (rows.tensor, residual_rows.tensor, weight, bias, output, *optional, rstd),
        (num_rows, cols, inner, *rows[1:], *residual_rows[1:], weight.stride(0), bias.stride(0), eps),
        CENTRED=mean is not None,
        ADDED=residual is not None,
        LOOPED=plan.looped,
        STEERED=plan.steered,
        LANES=min(plan.block_cols, plan.num_warps * 32 * VECTOR_BYTES // x.element_size()),
        COMPUTE=triton_launch.COMPUTE[x.dtype],
        INDEX=triton_launch.index_type(num_rows + plan.block_rows),
        BLOCK_ROWS=plan.block_rows,
        BLOCK_COLS=plan.block_cols,
        num_warps=plan.num_warps,
    )


def launch_backward(
    grad_x: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    added: torch.Tensor | None = None,
) -> None:
    """Write the first three; one that is not needed is None. The rows must not be empty.

    The gradient of x, which was normalized, is that through the norm plus `added`, a contiguous tensor.
    """
    num_rows, cols = rstd.shape[0], x.shape[-1]
    inner, (grad_rows, rows) = as_rows(grad_output, x)
    multiprocessors = triton_launch.multiprocessors(x.device)
    plan = backward_plan(cols, x.dtype, mean is not None, added is not None)
    plan = plan_for_rows(plan, num_rows, multiprocessors // 4, cols, grad_rows, rows)
    tensors = (grad_rows.tensor, rows.tensor, weight, rstd if mean is None else mean, rstd)
    sizes = (num_rows, cols, inner, *grad_rows[1:], *rows[1:], weight.stride(0))
    parameters = grad_weight is not None or grad_bias is not None
    pieces = cdiv(cols, plan.block_cols)
    most = plan.programs * multiprocessors
    tiles = cdiv(num_rows, plan.block_rows)
    # At least two programs per piece of columns, so that the second stage also adds several partial sums on the CPU.
    programs = min(num_rows, most) if plan.kept else min(tiles, max(most // pieces, 2))
    few = num_rows <= (FEW_ROWS if x.is_cuda else FEW_ROWS_ON_CPU)
    direct = parameters and few and not (plan.looped or plan.kept)
    partial = rstd.new_empty((1 if mean is None else 2, programs if parameters and not direct else 0, cols))
    results = (rstd if grad_x is None else grad_x, partial)
    added_or_none = rstd if added is None else added
    compute = {"CENTRED": mean is not None, "COMPUTE": triton_launch.COMPUTE[x.dtype]}
    options = {
        "NEEDS_X": grad_x is not None,
        "NEEDS_PARAMETERS": parameters,
        "ADDED": added is not None,
        **compute,
        "INDEX": triton_launch.index_type(num_rows + (programs + 1) * plan.block_rows),
        "num_warps": plan.num_warps,
        "maxnreg": plan.registers,
    }
    if plan.kept:
        line_cols = LINE_BYTES // x.element_size()
        triton_launch.launch(
            norm_backward_kept_kernel,
            (programs,),
            (*tensors, added_or_none, *results),
            sizes,
            **options,
            FETCH=not triton_launch.INTERPRETED,  # by an instruction that the interpreter does not know
            LINES=next_power_of_2(cdiv(cols, line_cols)),
            LINE_COLS=line_cols,
            AT_ONCE=plan.block_rows,
            PIECES=pieces,
            LANES=plan.block_cols,
        )
    else:
        means = rstd
        if plan.looped and grad_x is not None:
            means = rstd.new_empty((2, num_rows))
            triton_launch.launch(
                norm_backward_means_kernel,
                (num_rows,),
                (*tensors, means),
                sizes,
                **compute,
                BLOCK_COLS=LOOPED_BYTES // max(x.element_size(), 4),
                num_warps=8,
            )
        gradients = (rstd, rstd)
        if direct:
            programs = tiles + cdiv(cols, DIRECT_COLS)
            gradients = tuple(weight.new_empty(cols) if each is None else each for each in (grad_weight, grad_bias))
        triton_launch.launch(
            norm_backward_kernel,
            (pieces, programs),
            (*tensors, added_or_none, means, *results, *gradients),
            sizes,
            **options,
            DIRECT=DIRECT_COLS if direct else 0,
            LOOPED=plan.looped,
            AHEAD=plan.ahead and not direct,
            BLOCK_ROWS=plan.block_rows,
            BLOCK_COLS=plan.block_cols,
        )
    if parameters and not direct:
        launch_sums(grad_weight, grad_bias, partial)


def launch_sums(grad_weight: torch.Tensor | None, grad_bias: torch.Tensor | None, partial: torch.Tensor) -> None:
    """Write the gradients of weight and bias, unless None, from ``[2, partials, cols]`` sums over some rows each."""
    _, partials, cols = partial.shape
    block_partials, block_cols = summing_blocks(cols, partials)
    gradients = tuple(partial if gradient is None else gradient for gradient in (grad_weight, grad_bias))
    triton_launch.launch(
        norm_sum_partials_kernel,
        (cdiv(cols, block_cols),),
        (partial, *gradients),
        (partials, cols),
        NEEDS_WEIGHT=grad_weight is not None,
        NEEDS_BIAS=grad_bias is not None,
        COMPUTE=triton_launch.COMPUTE[partial.dtype],
        BLOCK_PARTIALS=block_partials,
        BLOCK_COLS=block_cols,
    )


def _forward(output: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, *rest: Any) -> None:
    launch_forward(output, None, mean, rstd, x, None, *rest)


def _backward(
    grad_x: torch.Tensor, grad_weight: torch.Tensor, grad_bias: torch.Tensor, needs: Needs, *rest: Any
) -> None:
    gradients = zip((grad_x, grad_weight, grad_bias), needs)
    launch_backward(*(gradient if needed else None for gradient, needed in gradients), *rest)


layer_norm = register_layer_norm("triton", _forward, _backward)
