"""cumsum in Triton: rows are read once, in tiles, and each tile passes its sum to the next."""

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv, next_power_of_2, resident
from fourfold.backends.strides import as_rows
from fourfold.backends.triton import launch as triton_launch

from ..triton_rows import row_offsets
from .operators import register

TILE, LEAST_COLS, MOST_COLS = 1024, 16, 8192
CHECKED = 1024  # offsets at a time


@triton.jit
def do_not_rise(offsets_ptr, offset_stride, segments, n, BLOCK: tl.constexpr):
    """Return how many segments do not fit: offsets rise from 0 to n."""
    wrong = tl.zeros((BLOCK,), tl.int32)
    for tile in range(tl.cdiv(segments, BLOCK)):
        at = tile * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        there = at < segments
        begins = tl.load(offsets_ptr + at * offset_stride, mask=there, other=0)
        ends = tl.load(offsets_ptr + (at + 1) * offset_stride, mask=there, other=0)
        fits = (begins <= ends) & ((at > 0) | (begins == 0)) & ((at < segments - 1) | (ends == n))
        wrong += (there & (fits == 0)).to(tl.int32)
    return tl.sum(wrong, axis=0)


@triton.jit(do_not_specialize=["num_rows", "segments"], do_not_specialize_on_alignment=["inner"])
def cumsum_kernel(
    x_ptr,  # [outer, inner, n], strided
    offsets_ptr,  # [segments + 1], strided; of no meaning unless GIVEN
    output_ptr,  # [rows, n]
    num_rows,
    n,
    inner,
    outer_stride,
    inner_stride,
    stride,
    segments,
    offset_stride,
    GIVEN: tl.constexpr,
    WHOLE: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    REVERSE: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    CHECKED: tl.constexpr,
):
    # One program owns every num_programs(1)-th segment of BLOCK_ROWS rows, or if WHOLE all columns, in one tile.
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = (rows < num_rows)[:, None]
    x_at = row_offsets(rows, inner, outer_stride, inner_stride)[:, None]
    output_at = rows.to(tl.int64)[:, None] * n
    count = segments
    valid = num_rows > 0
    if GIVEN:
        # With invalid offsets, tiles take the place of segments, and their sums begin with NaN.
        valid = do_not_rise(offsets_ptr, offset_stride, segments, n, CHECKED) == 0
        count = tl.where(valid, segments, tl.cdiv(n, BLOCK_COLS))
    # Triton 3.6 does not compile a loop that adds up sums from a constant on, and never reads the last one.
    nothing = tl.where(valid, 0.0, float("nan")).to(COMPUTE)
    # The compiler drops loops with one constant iteration.
    for segment in range(0 if WHOLE else tl.program_id(1), 1 if WHOLE else count, 1 if WHOLE else tl.num_programs(1)):
        begin = tl.cast(segment, tl.int64) * BLOCK_COLS
        end = tl.cast(n, tl.int64)
        if GIVEN:
            at = offsets_ptr + tl.minimum(tl.cast(segment, tl.int64), segments - 1) * offset_stride
            begin = tl.where(valid, tl.load(at).to(tl.int64), begin)
            end = tl.where(valid, tl.load(at + offset_stride).to(tl.int64), tl.minimum(begin + BLOCK_COLS, end))
        carry = tl.zeros((BLOCK_ROWS,), COMPUTE) + nothing
        for tile in range(1 if WHOLE else tl.cdiv(end - begin, BLOCK_COLS)):
            if REVERSE:
                columns = end - (tile + 1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
            else:
                columns = begin + tile * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
            # The exclusive sums are the inclusive ones of the neighbours.
            terms = columns
            if EXCLUSIVE:
                terms = columns + 1 if REVERSE else columns - 1
            mask = there & ((terms >= begin) & (terms < end))[None, :]
            x = tl.load(x_ptr + x_at + (terms * stride)[None, :], mask=mask, other=0.0).to(COMPUTE)
            sums = carry[:, None] + tl.cumsum(x, axis=1, reverse=REVERSE)
            carry += tl.sum(x, axis=1)
            mask = there & ((columns >= begin) & (columns < end))[None, :]
            tl.store(output_ptr + output_at + columns[None, :], sums.to(output_ptr.dtype.element_ty), mask=mask)


def _launch(
    output: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor | None, exclusive: bool, reverse: bool
) -> None:
    n, segments = x.shape[-1], 1 if offsets is None else len(offsets) - 1
    num_rows, (inner, (rows,)) = x.numel() // n, as_rows(x)
    # A tile depends on the row's length alone, so that a row's sums do not depend on the other rows.
    block_cols = min(max(next_power_of_2(cdiv(n, segments)), LEAST_COLS), MOST_COLS)
    block_rows = max(TILE // block_cols, 1) if offsets is None else 1
    blocks, tile = cdiv(num_rows, block_rows), block_rows * block_cols
    triton_launch.launch(
        cumsum_kernel,
        (blocks, min(segments, max(resident(x.device, 16) // blocks, 1))),
        (rows.tensor, x if offsets is None else offsets, output),
        (num_rows, n, inner, *rows[1:], segments, 1 if offsets is None else offsets.stride(0)),
        GIVEN=offsets is not None,
        WHOLE=offsets is None and n <= block_cols,
        EXCLUSIVE=exclusive,
        REVERSE=reverse,
        COMPUTE=triton_launch.COMPUTE[x.dtype],
        INDEX=triton_launch.index_type(num_rows + block_rows),
        BLOCK_ROWS=block_rows,
        BLOCK_COLS=block_cols,
        CHECKED=CHECKED,
        num_warps=max(min(tile // 512, 4), tile // 1024, 1),  # 16 columns a thread, 32 in the longest tiles
    )


cumsum = register("triton", _launch)
