"""softmax in Triton: rows that fit in registers are read once. Of longer rows, the rest is read twice."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv, l2_bytes, multiprocessors, next_power_of_2, resident
from fourfold.backends.signature import signature_of
from fourfold.backends.strides import as_rows
from fourfold.backends.triton import launch as triton_launch

from ..triton_rows import ANY_NUMBER_OF_ROWS, row_offsets
from .operators import SOFTMAX
from .torch_eager import softmax as definition


class Plan(NamedTuple):
    """How a program walks through its rows.

    Attributes:
        looped: whether a program reads one row tile by tile, most of it twice. Else it reads all of its rows at once.
        block_rows: rows of a tile. If looped, pieces of `block_cols` columns of one row.
        block_cols: columns of a tile.
        num_warps: warps per program.
        steered: whether cache policies favour data that are read twice over data that are read or written once.
    """

    looped: bool
    block_rows: int
    block_cols: int
    num_warps: int
    steered: bool = False


# The most elements of one tensor, at 4 bytes each in registers, that a program holds at once.
LONGEST_ROW = 32768


def plan(cols: int, itemsize: int, tensors: int) -> Plan:
    """Choose how to walk through rows of `cols` columns.

    Args:
        cols: at least 1.
        itemsize: bytes per element.
        tensors: the number of tensors that are read: 1 forward, 2 backward.
    """
    wide = max(itemsize, 4) // 4 * tensors
    block_cols = next_power_of_2(cols)
    if tensors == 1 and itemsize <= 4 and cols % 16 and block_cols >= 8192 * itemsize:
        # Triton uses vectors only if it knows that a row starts at a multiple of 16 elements. It loads single elements,
        # each with its address, sooner in short tiles. Reading them twice takes less than waiting for a row.
        lanes = min(block_cols * itemsize // 64, 1024 * itemsize)
        return Plan(True, 4, lanes, 32 if itemsize == 4 or block_cols > 32768 else lanes // 128)
    if block_cols * wide <= LONGEST_ROW:
        # A thread holds 16 to 32 registers of data: enough bytes in flight, no spills, and few threads per reduction.
        block_rows = max(1, 1024 // block_cols)
        if block_cols == 256 and cols % 16 == 0 and itemsize <= 4:
            # A row within one warp waits for no other: four rows of half types in four warps, two of float32 in one.
            return Plan(False, 8 // itemsize, block_cols, 4 if itemsize == 2 else 1)
        return Plan(False, block_rows, block_cols, min(max(block_rows * block_cols * wide // 1024, 2 * tensors), 32))
    # The lanes of a warp take neighbouring 16-byte vectors of a piece. There are many warps, so that few rows are read
    # at a time and still lie in the L2 cache at the second read. Backward, with two tensors, also keeps the last tile
    # in registers.
    vectors = cols % 16 == 0
    if tensors == 1:
        num_warps = 32 if itemsize == 4 else 16
        pieces = 4 if itemsize == 2 else 8 if vectors else 2
    else:
        num_warps = 16 if itemsize == 8 else 32
        pieces = 2 if itemsize == 2 else 4
    # Single elements of a cache line come from L1, and a policy for L2 would bypass L1.
    return Plan(True, pieces, num_warps * 32 * 16 // itemsize, num_warps, steered=vectors)


def programs(num_rows: int, by: Plan, cols: int, itemsize: int, device: torch.device) -> int:
    """Return the number of programs backward for a looped plan.

    If the L2 cache can hold what half of the multiprocessors read twice, launch no more programs than it can hold, each
    of which walks through several rows. Else each row has its own program. The order of a row's sum is the same.
    """
    if device.type == "cpu":
        return min(num_rows, resident(device, 1))
    again = 2 * (cols - by.block_rows * by.block_cols) * itemsize
    # A little less than half of the cache, because the writes take some of it.
    few = l2_bytes(device) * 9 // 20 // max(again, 1)
    most = multiprocessors(device)
    return few if by.steered and most // 2 <= few < min(most, num_rows) else num_rows


@triton.jit
def exponential(x):
    """Return e^x. In float32, subnormal results are 0, which saves four instructions of Triton's own exp."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    return tl.exp2(x * 1.4426950408889634)


@triton.jit(**ANY_NUMBER_OF_ROWS)
def softmax_forward_kernel(
    x_ptr,  # [outer, inner, cols], strided
    output_ptr,  # [outer * inner, cols]
    num_rows,
    cols,
    inner,
    x_outer_stride,
    x_inner_stride,
    x_column_stride,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_ROWS consecutive rows.
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLS).to(tl.int64)
    mask = (rows < num_rows)[:, None] & (columns < cols)[None, :]
    x_at = row_offsets(rows, inner, x_outer_stride, x_inner_stride)[:, None] + (columns * x_column_stride)[None, :]
    x = tl.load(x_ptr + x_at, mask=mask, other=float("-inf")).to(COMPUTE)
    # If the maximum drops a NaN, the sum brings it back.
    terms = exponential(x - tl.max(x, axis=1)[:, None])
    output = terms * (1.0 / tl.sum(terms, axis=1))[:, None]
    output_at = rows.to(tl.int64)[:, None] * cols + columns[None, :]
    tl.store(output_ptr + output_at, output.to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit(**ANY_NUMBER_OF_ROWS)
def softmax_backward_kernel(
    grad_output_ptr,  # [outer, inner, cols], strided
    output_ptr,  # [outer, inner, cols], strided
    grad_x_ptr,  # [outer * inner, cols]
    num_rows,
    cols,
    inner,
    grad_output_outer_stride,
    grad_output_inner_stride,
    grad_output_column_stride,
    output_outer_stride,
    output_inner_stride,
    output_column_stride,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_ROWS consecutive rows.
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLS).to(tl.int64)
    mask = (rows < num_rows)[:, None] & (columns < cols)[None, :]
    grad_at = row_offsets(rows, inner, grad_output_outer_stride, grad_output_inner_stride)
    output_at = row_offsets(rows, inner, output_outer_stride, output_inner_stride)
    grad_at = grad_at[:, None] + (columns * grad_output_column_stride)[None, :]
    output_at = output_at[:, None] + (columns * output_column_stride)[None, :]
    grad = tl.load(grad_output_ptr + grad_at, mask=mask, other=0.0).to(COMPUTE)
    output = tl.load(output_ptr + output_at, mask=mask, other=0.0).to(COMPUTE)
    grad_x = output * (grad - tl.sum(grad * output, axis=1)[:, None])
    grad_x_at = rows.to(tl.int64)[:, None] * cols + columns[None, :]
    tl.store(grad_x_ptr + grad_x_at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_forward_looped_kernel(
    x_ptr,  # [outer, inner, cols], strided
    output_ptr,  # [outer * inner, cols]
    cols,
    inner,
    x_outer_stride,
    x_inner_stride,
    x_column_stride,
    COMPUTE: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    STEERED: tl.constexpr,
):
    # One program owns one row, and each lane of a tile owns every LANES-th column of it.
    AGAIN: tl.constexpr = "evict_last" if STEERED else ""
    ONCE: tl.constexpr = "evict_first" if STEERED else ""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row_offsets(row, inner, x_outer_stride, x_inner_stride)
    output_ptr += row * cols
    columns = (tl.arange(0, PIECES) * LANES)[:, None] + tl.arange(0, LANES)[None, :]
    tiles = tl.cdiv(cols, PIECES * LANES)

    largest = tl.full((LANES,), float("-inf"), COMPUTE)
    total = tl.zeros((LANES,), COMPUTE)
    for tile in range(tiles):
        at = tl.cast(tile, tl.int64) * (PIECES * LANES) + columns
        x_at = at * x_column_stride
        x = tl.load(x_ptr + x_at, mask=at < cols, other=float("-inf"), eviction_policy=AGAIN).to(COMPUTE)
        new = tl.maximum(largest, tl.max(x, axis=0))
        # A lane that has seen only -inf has no terms yet. Subtracting any finite number makes them 0.
        reference = tl.where(new == float("-inf"), 0.0, new)
        total = total * exponential(largest - reference) + tl.sum(exponential(x - reference[None, :]), axis=0)
        largest = new
    row_largest = tl.max(largest, axis=0)
    reference = tl.where(row_largest == float("-inf"), 0.0, row_largest)
    scale = 1.0 / tl.sum(total * exponential(largest - reference), axis=0)

    # Walk backwards, because what was read last is still in a cache.
    for tile in range(tiles):
        at = tl.cast(tiles - 1 - tile, tl.int64) * (PIECES * LANES) + columns
        x = tl.load(x_ptr + at * x_column_stride, mask=at < cols, other=0.0, eviction_policy=ONCE).to(COMPUTE)
        output = (exponential(x - row_largest) * scale).to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + at, output, mask=at < cols, cache_modifier=".cs")


@triton.jit(**ANY_NUMBER_OF_ROWS)
def softmax_backward_looped_kernel(
    grad_output_ptr,  # [outer, inner, cols], strided
    output_ptr,  # [outer, inner, cols], strided
    grad_x_ptr,  # [outer * inner, cols]
    num_rows,
    cols,
    inner,
    grad_output_outer_stride,
    grad_output_inner_stride,
    grad_output_column_stride,
    output_outer_stride,
    output_inner_stride,
    output_column_stride,
    COMPUTE: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    STEERED: tl.constexpr,
):
    # One program owns every num_programs-th row, and each lane of a tile owns every LANES-th column of it.
    AGAIN: tl.constexpr = "evict_last" if STEERED else ""
    ONCE: tl.constexpr = "evict_first" if STEERED else ""
    LAST: tl.constexpr = "" if grad_x_ptr.dtype.element_ty.primitive_bitwidth == 16 and not STEERED else "evict_first"
    columns = ((tl.arange(0, PIECES) * LANES)[:, None] + tl.arange(0, LANES)[None, :]).to(tl.int64)
    # All tiles except the last are whole and need no mask.
    tiles = tl.cdiv(cols, PIECES * LANES) - 1
    start = tl.cast(tiles, tl.int64) * (PIECES * LANES)
    mask = columns < cols - start

    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        grad_row = grad_output_ptr + row_offsets(row, inner, grad_output_outer_stride, grad_output_inner_stride)
        output_row = output_ptr + row_offsets(row, inner, output_outer_stride, output_inner_stride)
        grad_x_row = grad_x_ptr + tl.cast(row, tl.int64) * cols

        products = tl.zeros((LANES,), COMPUTE)
        for tile in range(tiles):
            first = tl.cast(tile, tl.int64) * (PIECES * LANES)
            grad_at = first * grad_output_column_stride + columns * grad_output_column_stride
            output_at = first * output_column_stride + columns * output_column_stride
            grad = tl.load(grad_row + grad_at, eviction_policy=AGAIN).to(COMPUTE)
            output = tl.load(output_row + output_at, eviction_policy=AGAIN).to(COMPUTE)
            products += tl.sum(grad * output, axis=0)

        # The last tile stays in registers, which no other tile needs by then.
        grad_at = start * grad_output_column_stride + columns * grad_output_column_stride
        output_at = start * output_column_stride + columns * output_column_stride
        grad = tl.load(grad_row + grad_at, mask=mask, other=0.0, eviction_policy=ONCE).to(COMPUTE)
        output = tl.load(output_row + output_at, mask=mask, other=0.0, eviction_policy=ONCE).to(COMPUTE)
        product = tl.sum(products + tl.sum(grad * output, axis=0), axis=0)
        grad_x = (output * (grad - product)).to(grad_x_ptr.dtype.element_ty)
        tl.store(grad_x_row + start + columns, grad_x, mask=mask, cache_modifier=".cs")

        # Walk backwards, because what was read last is still in a cache.
        for tile in range(tiles):
            first = tl.cast(tiles - 1 - tile, tl.int64) * (PIECES * LANES)
            grad_at = first * grad_output_column_stride + columns * grad_output_column_stride
            output_at = first * output_column_stride + columns * output_column_stride
            grad = tl.load(grad_row + grad_at, eviction_policy=LAST).to(COMPUTE)
            output = tl.load(output_row + output_at, eviction_policy=LAST).to(COMPUTE)
            grad_x = (output * (grad - product)).to(grad_x_ptr.dtype.element_ty)
            tl.store(grad_x_row + first + columns, grad_x, cache_modifier=".cs")


def _launch(
    looped_kernel: Any, kernel: Any, tensors: tuple[torch.Tensor, ...], sizes: tuple[int, ...], tensors_read: int
) -> None:
    """Write the last of the tensors, which is contiguous and not empty. sizes starts with the number of columns."""
    result, cols = tensors[-1], sizes[0]
    num_rows = result.numel() // cols
    by = plan(cols, result.element_size(), tensors_read)
    compute = triton_launch.COMPUTE[result.dtype]
    if by.looped:
        backward = tensors_read == 2
        triton_launch.launch(
            looped_kernel,
            (programs(num_rows, by, cols, result.element_size(), result.device) if backward else num_rows,),
            tensors,
            (num_rows, *sizes) if backward else sizes,
            COMPUTE=compute,
            PIECES=by.block_rows,
            LANES=by.block_cols,
            STEERED=by.steered,
            num_warps=by.num_warps,
        )
    else:
        triton_launch.launch(
            kernel,
            (cdiv(num_rows, by.block_rows),),
            tensors,
            (num_rows, *sizes),
            COMPUTE=compute,
            INDEX=triton_launch.index_type(num_rows + by.block_rows),
            BLOCK_ROWS=by.block_rows,
            BLOCK_COLS=by.block_cols,
            num_warps=by.num_warps,
        )


def _forward(x: torch.Tensor) -> torch.Tensor:
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if output.numel():
        inner, (rows,) = as_rows(x)
        tensors, sizes = (rows.tensor, output), (x.shape[-1], inner, *rows[1:])
        _launch(softmax_forward_looped_kernel, softmax_forward_kernel, tensors, sizes, tensors_read=1)
    return output


def _backward(grad_output: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    grad_x = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    if grad_x.numel():
        inner, (grad_rows, rows) = as_rows(grad_output, output)
        tensors = (grad_rows.tensor, rows.tensor, grad_x)
        sizes = (output.shape[-1], inner, *grad_rows[1:], *rows[1:])
        _launch(softmax_backward_looped_kernel, softmax_backward_kernel, tensors, sizes, tensors_read=2)
    return grad_x


softmax_operator = SOFTMAX.register("triton", _forward, _backward)
softmax = signature_of(definition).checked(softmax_operator)
