"""add_rms_norm in Triton: the sum and its norm in one kernel; backward is that of rms_norm, and adds a cotangent."""

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv
from fourfold.backends.strides import as_rows
from fourfold.backends.triton import launch as triton_launch

from ..rms_norm.triton_kernel import forward_plan, launch_backward
from ..triton_rows import NUMBERS_OF_ROWS, load_parameter, load_tile, store_tile
from .operators import register


@triton.jit(do_not_specialize=NUMBERS_OF_ROWS)
def add_rms_norm_forward_kernel(
    x_ptr,  # [outer, inner, cols], strided
    residual_ptr,  # [outer, inner, cols], strided
    weight_ptr,  # [cols], strided
    y_ptr,  # [outer * inner, cols]
    residual_out_ptr,  # [outer * inner, cols]
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
    eps: tl.float64,  # else Triton rounds it to float32
    LOOPED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns BLOCK_ROWS consecutive rows. It holds them, or goes through pieces of BLOCK_COLS columns, twice.
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLS)
    squares = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
    held = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
    for start in range(0, cols if LOOPED else 1, BLOCK_COLS):
        at = start + columns
        x = load_tile(x_ptr, rows, at, num_rows, cols, inner, x_outer_stride, x_inner_stride, x_column_stride)
        residual = load_tile(
            residual_ptr, rows, at, num_rows, cols, inner,
            residual_outer_stride, residual_inner_stride, residual_column_stride,
        )  # fmt: skip
        # What is normalized is what is stored: the rounded sum.
        added = (x.to(COMPUTE) + residual.to(COMPUTE)).to(residual_out_ptr.dtype.element_ty)
        store_tile(residual_out_ptr, rows, at, num_rows, cols, added)
        held = added.to(COMPUTE)
        # Mask the squares. Else the product could be fused into the sum of a row in one lane and not in another, and
        # the lanes would store different numbers to the same place.
        squares += tl.where((at < cols)[None, :], held * held, 0.0)
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / tl.full((), cols, COMPUTE) + tl.full((), eps, COMPUTE))
    tl.store(rstd_ptr + rows.to(tl.int64), rstd, mask=rows < num_rows)
    if LOOPED:
        tl.debug_barrier()  # other threads than those that stored the sums may read them
        pieces = tl.cdiv(cols, BLOCK_COLS)
        for piece in range(pieces):
            # Walk backwards, because what was stored last is still in a cache.
            at = (pieces - 1 - piece) * BLOCK_COLS + columns
            added = load_tile(residual_out_ptr, rows, at, num_rows, cols, num_rows, 0, cols, 1)
            weight = load_parameter(weight_ptr, at, cols, weight_stride, COMPUTE)
            store_tile(y_ptr, rows, at, num_rows, cols, added.to(COMPUTE) * rstd[:, None] * weight[None, :])
    else:
        weight = load_parameter(weight_ptr, columns, cols, weight_stride, COMPUTE)
        store_tile(y_ptr, rows, columns, num_rows, cols, held * rstd[:, None] * weight[None, :])


def _forward(
    y: torch.Tensor,
    residual_out: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> None:
    num_rows, cols = rstd.shape[0], x.shape[-1]
    inner, (rows, residual_rows) = as_rows(x, residual)
    by = forward_plan(cols, x.dtype, least=2048)
    triton_launch.launch(
        add_rms_norm_forward_kernel,
        (cdiv(num_rows, by.block_rows),),
        (rows.tensor, residual_rows.tensor, weight, y, residual_out, rstd),
        (num_rows, cols, inner, *rows[1:], *residual_rows[1:], weight.stride(0), eps),
        LOOPED=by.looped,
        COMPUTE=triton_launch.COMPUTE[x.dtype],
        INDEX=triton_launch.index_type(num_rows + by.block_rows),
        BLOCK_ROWS=by.block_rows,
        BLOCK_COLS=by.block_cols,
        num_warps=by.num_warps,
    )


add_rms_norm = register("triton", _forward, launch_backward)
