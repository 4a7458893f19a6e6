"""rope in Triton."""

import triton
import triton.language as tl

from fourfold.backends.launch import FEW_ELEMENTS, cdiv, next_power_of_2
from fourfold.backends.triton import launch as triton_launch

from ..triton_rows import row_offsets
from .operators import Turn, register

# Pairs of a program: many where each thread has vectors of them, fewer where there are few, or no vectors.
TILE_PAIRS, FEW_PAIRS = 2048, 256
MOST_PAIRS = 1024  # of a row at a time
MOST_PIECES = 8  # of the columns without a partner, where there are few pairs and many of these


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["inner"])
def rope_kernel(
    x_ptr,  # [outer, inner, heads, dim], strided
    cos_ptr,  # [num_positions, half], strided
    sin_ptr,  # [num_positions, half], strided
    positions_ptr,  # [tokens], strided; of no meaning unless GIVEN
    output_ptr,  # [rows, dim]: a row is a head of a token
    num_tokens,
    seq,
    num_positions,
    heads,
    dim,
    half,
    inner,
    x_outer_stride,
    x_inner_stride,
    x_head_stride,
    x_stride,
    cos_row_stride,
    cos_stride,
    sin_row_stride,
    sin_stride,
    position_stride,
    GIVEN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    # One program owns BLOCK_ROWS rows, each a head of a token.
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens = rows // heads
    there = tokens < num_tokens
    position = (tokens % seq).to(tl.int64)
    if GIVEN:
        position = tl.load(positions_ptr + tokens.to(tl.int64) * position_stride, mask=there, other=0)
    known = (position >= 0) & (position < num_positions)
    x_at = row_offsets(tokens, inner, x_outer_stride, x_inner_stride)
    x_at += (rows - tokens * heads).to(tl.int64) * x_head_stride
    for piece in range(tl.cdiv(half, BLOCK_PAIRS)):
        pairs = piece * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
        wide = pairs.to(tl.int64)[None, :]
        mask = there[:, None] & (pairs < half)[None, :]
        cos_at = position[:, None] * cos_row_stride + wide * cos_stride
        sin_at = position[:, None] * sin_row_stride + wide * sin_stride
        # Of a position that there is not, the angle is NaN.
        c = tl.load(cos_ptr + cos_at, mask=mask & known[:, None], other=float("nan")).to(COMPUTE)
        s = tl.load(sin_ptr + sin_at, mask=mask & known[:, None], other=float("nan")).to(COMPUTE)
        if BACK:
            s = -s
        if INTERLEAVED:
            # Neighbours are loaded together, and separated in registers.
            columns = piece * (2 * BLOCK_PAIRS) + tl.arange(0, 2 * BLOCK_PAIRS)
            among = there[:, None] & (columns < 2 * half)[None, :]
            at = x_at[:, None] + columns.to(tl.int64)[None, :] * x_stride
            tile = tl.load(x_ptr + at, mask=among, other=0.0).to(COMPUTE)
            first, second = tl.split(tl.reshape(tile, (BLOCK_ROWS, BLOCK_PAIRS, 2)))
            turned = tl.reshape(tl.join(first * c - second * s, second * c + first * s), (BLOCK_ROWS, 2 * BLOCK_PAIRS))
            output_at = rows.to(tl.int64)[:, None] * dim + columns[None, :]
            tl.store(output_ptr + output_at, turned.to(output_ptr.dtype.element_ty), mask=among)
        else:
            at = x_at[:, None] + wide * x_stride
            first = tl.load(x_ptr + at, mask=mask, other=0.0).to(COMPUTE)
            second = tl.load(x_ptr + at + tl.cast(half, tl.int64) * x_stride, mask=mask, other=0.0).to(COMPUTE)
            output_at = rows.to(tl.int64)[:, None] * dim + wide
            turned = (first * c - second * s).to(output_ptr.dtype.element_ty)
            tl.store(output_ptr + output_at, turned, mask=mask)
            turned = (second * c + first * s).to(output_ptr.dtype.element_ty)
            tl.store(output_ptr + output_at + half, turned, mask=mask)
    for piece in range(tl.cdiv(dim - 2 * half, BLOCK_PAIRS)):
        columns = (2 * half + piece * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)).to(tl.int64)[None, :]
        mask = there[:, None] & (columns < dim)
        alone = tl.load(x_ptr + x_at[:, None] + columns * x_stride, mask=mask & known[:, None], other=float("nan"))
        tl.store(output_ptr + rows.to(tl.int64)[:, None] * dim + columns, alone, mask=mask)


def _launch(turn: Turn) -> None:
    x, cos, sin, positions, output = turn.tensors
    tokens, _, _, heads, dim, half, _ = turn.sizes
    alone = cdiv(dim - 2 * half, MOST_PIECES)
    block_pairs = min(next_power_of_2(max(half, alone, 1)), MOST_PAIRS)
    few = tokens * heads * block_pairs <= FEW_ELEMENTS[x.device.type] or half % 16 != 0
    block_rows = max((FEW_PAIRS if few else TILE_PAIRS) // block_pairs, 1)
    triton_launch.launch(
        rope_kernel,
        (cdiv(tokens * heads, block_rows),),
        (x, cos, sin, cos if positions is None else positions, output),
        (*turn.sizes, *turn.strides),
        GIVEN=positions is not None,
        INTERLEAVED=turn.interleaved,
        BACK=turn.back,
        COMPUTE=triton_launch.COMPUTE[x.dtype],
        INDEX=triton_launch.index_type(tokens * heads + block_rows),
        BLOCK_ROWS=block_rows,
        BLOCK_PAIRS=block_pairs,
    )


rope = register("triton", _launch)
