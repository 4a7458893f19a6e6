"""layer_norm in Triton: rows that fit in registers are read once, longer rows twice."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv, next_power_of_2
from fourfold.backends.strides import as_rows
from fourfold.backends.triton import launch as triton_launch

from ..triton_rows import NUMBERS_OF_ROWS, load_parameter, load_tile, row_offsets, store_tile
from .operators import Needs, register_layer_norm

# Columns per piece of a looped row. Forward, a program of all threads takes more at once.
LOOPED_COLS = 4096
FORWARD_COLS = 16384
# The same of a looped row backward, where a program has several rows.
COLUMN_BLOCK = 256
# Of the second stage: columns of a program, partial sums that it adds at once, and as many programs as any GPU needs.
SUMMED_COLS = 32
SUMMED_PARTIALS = 64
SUMMING_PROGRAMS = 512
# Longest row, in the type that is computed in, the sums of whose columns a program can hold.
KEPT_BYTES = 65536
# Bytes that one transfer from memory to the L2 cache brings.
LINE_BYTES = 128


class Plan(NamedTuple):
    """How the programs of a launch divide the rows.

    Attributes:
        looped: whether a row is read piece by piece, and twice, or at once.
        block_rows: rows that a program holds at once.
        block_cols: columns that it holds at once; all of them but where it is looped.
        num_warps: of a program.
        programs: for each multiprocessor, backward: they sum the gradients of weight and bias over the rows they own.
        registers: most that a thread may have, so that so many programs run at a time.
        kept: backward, where looped: whether a program reads its rows whole, in pieces of `block_cols` columns, up to
            `block_rows` of them at once, and holds the sums of all columns.
    """

    looped: bool
    block_rows: int
    block_cols: int
    num_warps: int
    programs: int = 0
    registers: int = 0
    kept: bool = False


def forward_plan(cols: int, dtype: torch.dtype) -> Plan:
    """Choose how forward walks through rows of `cols` columns, at least 1."""
    wide = 2 if dtype == torch.float64 else 1
    block_cols = next_power_of_2(cols)
    if cols % 16 and block_cols > 2048 and wide == 1:
        # Triton moves single elements unless it knows that a row is a multiple of 16. Short pieces are on their way in
        # turn: to read them twice, from a cache, takes less than to wait for a whole row.
        return Plan(True, 1, 1024 if block_cols <= 8192 else 2048, 4)
    if block_cols * wide > 32768:
        if wide == 2:
            return Plan(True, 1, LOOPED_COLS // wide, 8)
        return Plan(True, 1, FORWARD_COLS, 16 if dtype.itemsize == 2 else 32)
    # A thread holds 128 bytes of data (64 elements of half types): enough in flight, no spills, few threads per sum.
    per_warp, fewest = (2048, 2) if dtype.itemsize == 2 else (1024 // wide, 1)
    block_rows = max(1, per_warp // block_cols)
    return Plan(False, block_rows, block_cols, min(max(block_rows * block_cols // per_warp, fewest), 32))


def backward_plan(cols: int, dtype: torch.dtype) -> Plan:
    """Choose how backward walks through rows of `cols` columns, at least 1."""
    # Each column takes registers for x, grad_output, the next row of both, weight, and two sums. Spilling costs more
    # than reading twice. The table gives the elements per warp, and how many warps then fit on a multiprocessor.
    per_warp, warps = {2: (512, 16), 4: (1024, 8), 8: (256, 8)}[dtype.itemsize]
    block_cols = next_power_of_2(cols)
    if block_cols * max(dtype.itemsize, 4) > KEPT_BYTES:
        return Plan(True, 8, COLUMN_BLOCK * 4 // max(dtype.itemsize, 4), 4, 8)
    if block_cols > per_warp * warps:
        # The sums take half of a multiprocessor's registers. A thread holds one 16-byte vector of a piece. With half
        # types, two pieces at once are in flight while a row's means are summed.
        return Plan(True, 2 if dtype.itemsize == 2 else 1, 16 * 32 * 16 // dtype.itemsize, 16, 1, 128, kept=True)
    # Two rows at once wait half as often for their sums.
    block_rows = max(1, 8192 // max(dtype.itemsize, 4) // block_cols)
    num_warps = max(block_rows * block_cols // per_warp, 1)
    return Plan(False, block_rows, block_cols, num_warps, warps // num_warps, min(2048 // warps, 255))


def summing_blocks(cols: int, partials: int) -> tuple[int, int]:
    """Return partial sums, and columns of them, that a program of backward's second stage adds at once."""
    most = SUMMED_PARTIALS * SUMMED_COLS
    # Of long rows more columns, in exchange for partial sums, of which there are few then.
    enough = max(SUMMED_COLS, next_power_of_2(cdiv(cols, SUMMING_PROGRAMS)))
    block_cols = min(next_power_of_2(cols), enough, most)
    return min(next_power_of_2(partials), SUMMED_PARTIALS, most // block_cols), block_cols


@triton.jit(do_not_specialize=NUMBERS_OF_ROWS)
def layer_norm_forward_kernel(
    x_ptr,  # [outer, inner, cols], strided
    weight_ptr,  # [cols], strided
    bias_ptr,  # [cols], strided
    output_ptr,  # [outer * inner, cols]
    mean_ptr,  # [outer * inner]
    rstd_ptr,  # [outer * inner]
    num_rows,
    cols,
    inner,
    x_outer_stride,
    x_inner_stride,
    x_column_stride,
    weight_stride,
    bias_stride,
    eps: tl.float64,  # else Triton rounds it to float32
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_ROWS consecutive rows.
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLS)
    num = tl.full((), cols, COMPUTE)
    x = load_tile(x_ptr, rows, columns, num_rows, cols, inner, x_outer_stride, x_inner_stride, x_column_stride)
    x = x.to(COMPUTE)
    mean = tl.sum(x, axis=1) / num
    centred = x - mean[:, None]
    # Mask the squares, not `centred`. Else the product could be fused into the sum in one lane and not in another, the
    # lanes would round differently, and they would store different numbers to the same place.
    squares = tl.where((columns < cols)[None, :], centred * centred, 0.0)
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / num + tl.full((), eps, COMPUTE))
    weight = load_parameter(weight_ptr, columns, cols, weight_stride, COMPUTE)
    bias = load_parameter(bias_ptr, columns, cols, bias_stride, COMPUTE)
    output = centred * rstd[:, None] * weight[None, :] + bias[None, :]
    store_tile(output_ptr, rows, columns, num_rows, cols, output)
    tl.store(mean_ptr + rows.to(tl.int64), mean, mask=rows < num_rows)
    tl.store(rstd_ptr + rows.to(tl.int64), rstd, mask=rows < num_rows)


@triton.jit
def layer_norm_forward_looped_kernel(
    x_ptr,  # [outer, inner, cols], strided
    weight_ptr,  # [cols], strided
    bias_ptr,  # [cols], strided
    output_ptr,  # [outer * inner, cols]
    mean_ptr,  # [outer * inner]
    rstd_ptr,  # [outer * inner]
    cols,
    inner,
    x_outer_stride,
    x_inner_stride,
    x_column_stride,
    weight_stride,
    bias_stride,
    eps: tl.float64,  # else Triton rounds it to float32
    COMPUTE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns one row, which it reads in pieces of BLOCK_COLS columns.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row_offsets(row, inner, x_outer_stride, x_inner_stride)
    output_ptr += row * cols
    pieces = tl.cdiv(cols, BLOCK_COLS)
    lanes = tl.arange(0, BLOCK_COLS)

    mean = tl.zeros((), COMPUTE)
    squares = tl.zeros((), COMPUTE)
    for piece in range(pieces):
        columns = piece * BLOCK_COLS + lanes
        x = tl.load(x_ptr + columns.to(tl.int64) * x_column_stride, mask=columns < cols, other=0.0).to(COMPUTE)
        before = tl.full((), piece * BLOCK_COLS, COMPUTE)
        num = tl.full((), tl.minimum(cols - piece * BLOCK_COLS, BLOCK_COLS), COMPUTE)
        piece_mean = tl.sum(x, axis=0) / num
        centred = tl.where(columns < cols, x - piece_mean, 0.0)
        # Merge the squared deviations of two samples: Chan, Golub, LeVeque 1983, (2.1).
        share = num / (before + num)
        apart = piece_mean - mean
        mean += apart * share
        # Keep this order of factors: before the first piece, apart is the piece's mean, whose square may overflow.
        squares += tl.sum(centred * centred, axis=0) + before * apart * (apart * share)
    rstd = tl.rsqrt(squares / tl.full((), cols, COMPUTE) + tl.full((), eps, COMPUTE))
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)

    # Walk backwards, because what was read last is still in a cache.
    for piece in range(pieces):
        columns = (pieces - 1 - piece) * BLOCK_COLS + lanes
        x = tl.load(x_ptr + columns.to(tl.int64) * x_column_stride, mask=columns < cols, other=0.0).to(COMPUTE)
        weight = load_parameter(weight_ptr, columns, cols, weight_stride, COMPUTE)
        bias = load_parameter(bias_ptr, columns, cols, bias_stride, COMPUTE)
        output = (x - mean) * rstd * weight + bias
        tl.store(output_ptr + columns, output.to(output_ptr.dtype.element_ty), mask=columns < cols)


@triton.jit(do_not_specialize=NUMBERS_OF_ROWS)
def layer_norm_backward_kernel(
    grad_output_ptr,  # [outer, inner, cols], strided
    x_ptr,  # [outer, inner, cols], strided
    weight_ptr,  # [cols], strided
    mean_ptr,  # [outer * inner]
    rstd_ptr,  # [outer * inner]
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
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns every num_programs-th tile of BLOCK_ROWS rows.
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK_COLS)
    num = tl.full((), cols, COMPUTE)
    weight = load_parameter(weight_ptr, columns, cols, weight_stride, COMPUTE)
    grad_weight = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
    grad_bias = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)

    rows = program.to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    next_x = load_tile(x_ptr, rows, columns, num_rows, cols, inner, x_outer_stride, x_inner_stride, x_column_stride)
    next_grad = load_tile(
        grad_output_ptr, rows, columns, num_rows, cols, inner,
        grad_output_outer_stride, grad_output_inner_stride, grad_output_column_stride,
    )  # fmt: skip
    next_mean = tl.load(mean_ptr + rows.to(tl.int64), mask=rows < num_rows, other=0.0)
    next_rstd = tl.load(rstd_ptr + rows.to(tl.int64), mask=rows < num_rows, other=0.0)
    for _ in range(program, tl.cdiv(num_rows, BLOCK_ROWS), programs):
        x, grad, mean, rstd = next_x.to(COMPUTE), next_grad.to(COMPUTE), next_mean, next_rstd
        # Load the next tile while this one is summed and stored.
        next_rows = rows + programs * BLOCK_ROWS
        next_x = load_tile(
            x_ptr, next_rows, columns, num_rows, cols, inner, x_outer_stride, x_inner_stride, x_column_stride
        )
        next_grad = load_tile(
            grad_output_ptr, next_rows, columns, num_rows, cols, inner,
            grad_output_outer_stride, grad_output_inner_stride, grad_output_column_stride,
        )  # fmt: skip
        next_mean = tl.load(mean_ptr + next_rows.to(tl.int64), mask=next_rows < num_rows, other=0.0)
        next_rstd = tl.load(rstd_ptr + next_rows.to(tl.int64), mask=next_rows < num_rows, other=0.0)

        normal = (x - mean[:, None]) * rstd[:, None]
        if NEEDS_X:
            grad_normal = grad * weight[None, :]
            if BLOCK_COLS <= 16:
                # The zero is fused with the product, which rounds it. Without the zero, the subtraction of the mean
                # would be fused with it. That leaves the product's rounding error where all products are equal, as a
                # single one is, and the gradient is 0. The mean of many products has an error of its own, and keeping
                # the rounded products in registers costs up to a sixth of the time.
                grad_normal += 0.0
            mean_grad = tl.sum(grad_normal, axis=1) / num
            mean_product = tl.sum(grad_normal * normal, axis=1) / num
            grad_x = (grad_normal - mean_grad[:, None] - normal * mean_product[:, None]) * rstd[:, None]
            store_tile(grad_x_ptr, rows, columns, num_rows, cols, grad_x)
        if NEEDS_PARAMETERS:
            grad_weight += grad * normal
            grad_bias += grad
        rows = next_rows
    if NEEDS_PARAMETERS:
        at = program.to(tl.int64) * cols + columns
        tl.store(partial_ptr + at, tl.sum(grad_weight, axis=0), mask=columns < cols)
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


@triton.jit(do_not_specialize=NUMBERS_OF_ROWS)
def layer_norm_backward_kept_kernel(
    grad_output_ptr,  # [outer, inner, cols], strided
    x_ptr,  # [outer, inner, cols], strided
    weight_ptr,  # [cols], strided
    mean_ptr,  # [outer * inner]
    rstd_ptr,  # [outer * inner]
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
        grad_x_row = grad_x_ptr + row.to(tl.int64) * cols
        mean = tl.load(mean_ptr + row)
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
                at = grad_x_row + tl.cast(start, tl.int64) + lanes.to(tl.int64)
                tl.store(at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=columns < cols, cache_modifier=".cs")
            if NEEDS_PARAMETERS:
                grad_weight = with_added(grad_weight, PIECES - 1 - back, grad * normal)
                grad_bias = with_added(grad_bias, PIECES - 1 - back, grad)
    if NEEDS_PARAMETERS:
        for piece in tl.static_range(PIECES):
            columns = piece * LANES + lanes
            at = program.to(tl.int64) * cols + columns
            tl.store(partial_ptr + at, grad_weight[piece], mask=columns < cols)
            tl.store(partial_ptr + programs.to(tl.int64) * cols + at, grad_bias[piece], mask=columns < cols)


@triton.jit
def layer_norm_backward_means_kernel(
    grad_output_ptr,  # [outer, inner, cols], strided
    x_ptr,  # [outer, inner, cols], strided
    weight_ptr,  # [cols], strided
    mean_ptr,  # [outer * inner]
    rstd_ptr,  # [outer * inner]
    means_ptr,  # [2, outer * inner]: row means of grad_normal and of grad_normal * normal
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
    COMPUTE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns one row, which it reads in pieces of BLOCK_COLS columns.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row_offsets(row, inner, x_outer_stride, x_inner_stride)
    grad_output_ptr += row_offsets(row, inner, grad_output_outer_stride, grad_output_inner_stride)
    mean = tl.load(mean_ptr + row)
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
    tl.store(means_ptr + row, tl.sum(sums, axis=0) / num)
    tl.store(means_ptr + tl.cast(num_rows, tl.int64) + row, tl.sum(products, axis=0) / num)


@triton.jit(do_not_specialize=NUMBERS_OF_ROWS)
def layer_norm_backward_columns_kernel(
    grad_output_ptr,  # [outer, inner, cols], strided
    x_ptr,  # [outer, inner, cols], strided
    weight_ptr,  # [cols], strided
    mean_ptr,  # [outer * inner]
    rstd_ptr,  # [outer * inner]
    means_ptr,  # [2, outer * inner]
    grad_x_ptr,  # [outer * inner, cols]
    partial_ptr,  # [2, programs along axis 1, cols]
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
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_COLS columns of every num_programs(1)-th tile of BLOCK_ROWS rows.
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    columns = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    weight = load_parameter(weight_ptr, columns, cols, weight_stride, COMPUTE)
    grad_weight = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
    grad_bias = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
    for tile in range(program, tl.cdiv(num_rows, BLOCK_ROWS), programs):
        rows = tl.cast(tile, INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        at = rows.to(tl.int64)
        x = load_tile(x_ptr, rows, columns, num_rows, cols, inner, x_outer_stride, x_inner_stride, x_column_stride)
        grad = load_tile(
            grad_output_ptr, rows, columns, num_rows, cols, inner,
            grad_output_outer_stride, grad_output_inner_stride, grad_output_column_stride,
        ).to(COMPUTE)  # fmt: skip
        mean = tl.load(mean_ptr + at, mask=rows < num_rows, other=0.0)
        rstd = tl.load(rstd_ptr + at, mask=rows < num_rows, other=0.0)
        normal = (x.to(COMPUTE) - mean[:, None]) * rstd[:, None]
        if NEEDS_X:
            mean_grad = tl.load(means_ptr + at, mask=rows < num_rows, other=0.0)
            mean_product = tl.load(means_ptr + num_rows + at, mask=rows < num_rows, other=0.0)
            grad_x = (grad * weight[None, :] - mean_grad[:, None] - normal * mean_product[:, None]) * rstd[:, None]
            store_tile(grad_x_ptr, rows, columns, num_rows, cols, grad_x)
        if NEEDS_PARAMETERS:
            grad_weight += grad * normal
            grad_bias += grad
    if NEEDS_PARAMETERS:
        at = program.to(tl.int64) * cols + columns
        tl.store(partial_ptr + at, tl.sum(grad_weight, axis=0), mask=columns < cols)
        tl.store(partial_ptr + programs.to(tl.int64) * cols + at, tl.sum(grad_bias, axis=0), mask=columns < cols)


@triton.jit
def layer_norm_sum_partials_kernel(
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
    mean: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    plan: Plan,
) -> None:
    """Write output, mean and rstd. The rows must not be empty."""
    cols, num_rows = x.shape[-1], mean.shape[0]
    inner, (rows,) = as_rows(x)
    tensors = (rows.tensor, weight, bias, output, mean, rstd)
    rest = (*rows[1:], weight.stride(0), bias.stride(0), eps)
    options = {"COMPUTE": triton_launch.COMPUTE[x.dtype], "BLOCK_COLS": plan.block_cols}
    if plan.looped:
        triton_launch.launch(
            layer_norm_forward_looped_kernel,
            (num_rows,),
            tensors,
            (cols, inner, *rest),
            **options,
            num_warps=plan.num_warps,
        )
    else:
        triton_launch.launch(
            layer_norm_forward_kernel,
            (cdiv(num_rows, plan.block_rows),),
            tensors,
            (num_rows, cols, inner, *rest),
            **options,
            INDEX=triton_launch.index_type(num_rows + plan.block_rows),
            BLOCK_ROWS=plan.block_rows,
            num_warps=plan.num_warps,
        )


def launch_backward(
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    grad_bias: torch.Tensor,
    needs: Needs,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    plan: Plan,
) -> None:
    """Write the gradients that are needed. The rows must not be empty."""
    cols, num_rows = x.shape[-1], mean.shape[0]
    inner, (grad_rows, rows) = as_rows(grad_output, x)
    tensors = (grad_rows.tensor, rows.tensor, weight, mean, rstd)
    sizes = (num_rows, cols, inner, *grad_rows[1:], *rows[1:], weight.stride(0))
    compute = triton_launch.COMPUTE[x.dtype]
    pieces = cdiv(cols, plan.block_cols)
    most = plan.programs * triton_launch.multiprocessors(x.device)
    tiles = cdiv(num_rows, plan.block_rows)
    # At least two programs per piece of columns, so that the second stage also adds several partial sums on the CPU.
    programs = min(num_rows, most) if plan.kept else min(tiles, max(most // pieces, 2))
    partial = mean.new_empty((2, programs if needs.parameters else 0, cols))
    options = {
        "NEEDS_X": needs.x,
        "NEEDS_PARAMETERS": needs.parameters,
        "COMPUTE": compute,
        "INDEX": triton_launch.index_type(num_rows + (programs + 1) * plan.block_rows),
        "num_warps": plan.num_warps,
    }
    blocks = {"BLOCK_ROWS": plan.block_rows, "BLOCK_COLS": plan.block_cols}
    if plan.kept:
        line_cols = LINE_BYTES // x.element_size()
        triton_launch.launch(
            layer_norm_backward_kept_kernel,
            (programs,),
            (*tensors, grad_x, partial),
            sizes,
            **options,
            FETCH=not triton_launch.INTERPRETED,  # by an instruction that the interpreter does not know
            LINES=next_power_of_2(cdiv(cols, line_cols)),
            LINE_COLS=line_cols,
            AT_ONCE=plan.block_rows,
            PIECES=pieces,
            LANES=plan.block_cols,
            maxnreg=plan.registers,
        )
    elif plan.looped:
        means = mean.new_empty((2, num_rows))
        if needs.x:
            triton_launch.launch(
                layer_norm_backward_means_kernel,
                (num_rows,),
                (*tensors, means),
                sizes,
                COMPUTE=compute,
                BLOCK_COLS=LOOPED_COLS,
                num_warps=8,
            )
        triton_launch.launch(
            layer_norm_backward_columns_kernel,
            (pieces, programs),
            (*tensors, means, grad_x, partial),
            sizes,
            **options,
            **blocks,
        )
    else:
        triton_launch.launch(
            layer_norm_backward_kernel,
            (programs,),
            (*tensors, grad_x, partial),
            sizes,
            **options,
            **blocks,
            maxnreg=plan.registers,
        )
    if needs.parameters:
        launch_sums(grad_weight, grad_bias, needs, partial)


def launch_sums(grad_weight: torch.Tensor, grad_bias: torch.Tensor, needs: Needs, partial: torch.Tensor) -> None:
    """Write the gradients of weight and bias that are needed, from ``[2, partials, cols]`` sums over some rows each."""
    _, partials, cols = partial.shape
    block_partials, block_cols = summing_blocks(cols, partials)
    triton_launch.launch(
        layer_norm_sum_partials_kernel,
        (cdiv(cols, block_cols),),
        (partial, grad_weight, grad_bias),
        (partials, cols),
        NEEDS_WEIGHT=needs.weight,
        NEEDS_BIAS=needs.bias,
        COMPUTE=triton_launch.COMPUTE[grad_weight.dtype],
        BLOCK_PARTIALS=block_partials,
        BLOCK_COLS=block_cols,
    )


def _forward(
    output: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> None:
    launch_forward(output, mean, rstd, x, weight, bias, eps, forward_plan(x.shape[-1], x.dtype))


def _backward(
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    grad_bias: torch.Tensor,
    needs: Needs,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> None:
    plan = backward_plan(x.shape[-1], x.dtype)
    launch_backward(grad_x, grad_weight, grad_bias, needs, grad_output, x, weight, mean, rstd, plan)


layer_norm = register_layer_norm("triton", _forward, _backward)
