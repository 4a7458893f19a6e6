"""giou_loss in Triton: one launch forward, one launch backward."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from fourfold.backends import workspace
from fourfold.backends.launch import cdiv, next_power_of_2, resident
from fourfold.backends.operators import empty_gradients
from fourfold.backends.triton import launch as triton_launch

from ..giou.triton_boxes import (
    BACKWARD_ROWS,
    FORWARD_ROWS,
    grad_of,
    grad_of_pair,
    load_boxes,
    packed,
    score_of,
    store_boxes,
)
from ..triton_rows import row_offsets
from .operators import num_saved, register_loss
from .torch_eager import giou_loss as definition

# Enough programs per multiprocessor to keep the memory busy, few enough that the last one sums the partial results
# soon.
PROGRAMS_PER_MULTIPROCESSOR = 8
# Do not specialize on these: packed boxes do not use them, and for other boxes the gain is not worth a compilation.
STRIDES = [
    "max_boxes",
    "pred_batch_stride",
    "pred_box_stride",
    "pred_coordinate_stride",
    "target_batch_stride",
    "target_box_stride",
    "target_coordinate_stride",
]


@triton.jit(do_not_specialize=STRIDES)
def giou_loss_forward_kernel(
    pred_ptr,  # [batch, max_boxes, 4], strided
    target_ptr,  # [batch, max_boxes, 4], strided
    loss_ptr,  # []
    saved_ptr,  # [2 + ceil(batch * max_boxes / 32)]: number of valid rows, then one bit per row
    partials_ptr,  # [2, programs] float64: sums and counts
    counter_ptr,  # [1]: number of finished programs
    num_rows,
    max_boxes,
    pred_batch_stride,
    pred_box_stride,
    pred_coordinate_stride,
    target_batch_stride,
    target_box_stride,
    target_coordinate_stride,
    eps: tl.float64,  # else Triton rounds it to float32
    MEASURE: tl.constexpr,
    PACKED_PRED: tl.constexpr,
    PACKED_TARGET: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
):
    # One program owns every num_programs-th tile of BLOCK_ROWS rows. The last to finish sums all partial results.
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    eps = tl.full((), eps, COMPUTE)
    sums = tl.zeros((BLOCK_ROWS,), COMPUTE)
    counts = tl.zeros((BLOCK_ROWS,), tl.int32)
    for tile in range(program, tl.cdiv(num_rows, BLOCK_ROWS), programs):
        rows = tl.cast(tile, INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = rows < num_rows
        target_at = rows if PACKED_TARGET else row_offsets(rows, max_boxes, target_batch_stride, target_box_stride)
        bx1, by1, bx2, by2 = load_boxes(
            target_ptr, rows, target_at, target_coordinate_stride, mask, COMPUTE, PACKED_TARGET
        )
        valid = mask & (by2 > 0)
        pred_at = rows if PACKED_PRED else row_offsets(rows, max_boxes, pred_batch_stride, pred_box_stride)
        ax1, ay1, ax2, ay2 = load_boxes(pred_ptr, rows, pred_at, pred_coordinate_stride, valid, COMPUTE, PACKED_PRED)
        score = score_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, MEASURE)
        sums += tl.where(valid, 1.0 - score, 0.0)
        counts += valid.to(tl.int32)

        lanes = tl.arange(0, 32)
        bits = tl.reshape(valid.to(tl.int32), (BLOCK_ROWS // 32, 32)) << lanes[None, :]
        words = tl.cast(tile, INDEX) * (BLOCK_ROWS // 32) + tl.arange(0, BLOCK_ROWS // 32)
        tl.store(saved_ptr + 2 + words.to(tl.int64), tl.sum(bits, axis=1), mask=words < tl.cdiv(num_rows, 32))

    tl.store(partials_ptr + program, tl.sum(sums, axis=0).to(tl.float64))
    tl.store(partials_ptr + programs + program, tl.sum(counts.to(tl.int64), axis=0).to(tl.float64))
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.debug_barrier()
        ids = tl.arange(0, BLOCK_PROGRAMS)
        present = ids < programs
        # .cg reads from the L2 cache, which has the results of other multiprocessors. This one's L1 may not.
        total = tl.sum(tl.load(partials_ptr + ids, mask=present, other=0.0, cache_modifier=".cg"), axis=0)
        count = tl.sum(tl.load(partials_ptr + programs + ids, mask=present, other=0.0, cache_modifier=".cg"), axis=0)
        tl.store(loss_ptr, (total / tl.maximum(count, 1.0)).to(loss_ptr.dtype.element_ty))
        tl.store(saved_ptr.to(tl.pointer_type(tl.int64)), count.to(tl.int64))
        # Reset the counter for the next launch.
        tl.store(counter_ptr, 0)


@triton.jit(do_not_specialize=STRIDES)
def giou_loss_backward_kernel(
    grad_output_ptr,  # []
    pred_ptr,  # [batch, max_boxes, 4], strided
    target_ptr,  # [batch, max_boxes, 4], strided
    saved_ptr,  # [2 + ceil(batch * max_boxes / 32)]
    grad_pred_ptr,  # [batch, max_boxes, 4]
    grad_target_ptr,  # [batch, max_boxes, 4]
    num_rows,
    max_boxes,
    pred_batch_stride,
    pred_box_stride,
    pred_coordinate_stride,
    target_batch_stride,
    target_box_stride,
    target_coordinate_stride,
    eps: tl.float64,  # else Triton rounds it to float32
    MEASURE: tl.constexpr,
    NEEDS_PRED: tl.constexpr,
    NEEDS_TARGET: tl.constexpr,
    PACKED_PRED: tl.constexpr,
    PACKED_TARGET: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # One program owns BLOCK_ROWS consecutive rows. It reads only the valid rows and writes the gradient of all.
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = rows < num_rows
    eps = tl.full((), eps, COMPUTE)
    count = tl.load(saved_ptr.to(tl.pointer_type(tl.int64)))
    grad = -tl.load(grad_output_ptr).to(COMPUTE) / tl.maximum(count, 1).to(COMPUTE)
    word = tl.load(saved_ptr + 2 + (rows // 32).to(tl.int64), mask=mask, other=0)
    valid = ((word >> (rows % 32).to(tl.int32)) & 1) != 0
    pred_at = rows if PACKED_PRED else row_offsets(rows, max_boxes, pred_batch_stride, pred_box_stride)
    target_at = rows if PACKED_TARGET else row_offsets(rows, max_boxes, target_batch_stride, target_box_stride)
    ax1, ay1, ax2, ay2 = load_boxes(pred_ptr, rows, pred_at, pred_coordinate_stride, valid, COMPUTE, PACKED_PRED)
    bx1, by1, bx2, by2 = load_boxes(
        target_ptr, rows, target_at, target_coordinate_stride, valid, COMPUTE, PACKED_TARGET
    )
    grads = tl.zeros((BLOCK_ROWS,), COMPUTE) + grad
    of_pair = grad_of_pair(grads, ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, MEASURE)
    if NEEDS_PRED:
        x1, y1, x2, y2 = grad_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, of_pair, MEASURE, True)
        zero = tl.zeros((BLOCK_ROWS,), COMPUTE)
        x1, y1 = tl.where(valid, x1, zero), tl.where(valid, y1, zero)
        x2, y2 = tl.where(valid, x2, zero), tl.where(valid, y2, zero)
        store_boxes(grad_pred_ptr, rows, x1, y1, x2, y2, mask)
    if NEEDS_TARGET:
        x1, y1, x2, y2 = grad_of(bx1, by1, bx2, by2, ax1, ay1, ax2, ay2, eps, of_pair, MEASURE, False)
        zero = tl.zeros((BLOCK_ROWS,), COMPUTE)
        x1, y1 = tl.where(valid, x1, zero), tl.where(valid, y1, zero)
        x2, y2 = tl.where(valid, x2, zero), tl.where(valid, y2, zero)
        store_boxes(grad_target_ptr, rows, x1, y1, x2, y2, mask)


def _forward(measure: str, pred: torch.Tensor, target: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    device, num_rows = pred.device, pred.shape[0] * pred.shape[1]
    loss = torch.empty((), dtype=pred.dtype, device=device)
    saved = torch.empty(num_saved(num_rows), dtype=torch.int32, device=device)
    if num_rows == 0:
        return loss.zero_(), saved.zero_()
    programs = min(cdiv(num_rows, FORWARD_ROWS), resident(device, PROGRAMS_PER_MULTIPROCESSOR))
    triton_launch.launch(
        giou_loss_forward_kernel,
        (programs,),
        (
            pred,
            target,
            loss,
            saved,
            torch.empty(2 * programs, dtype=torch.float64, device=device),
            workspace.counter(device),
        ),
        (num_rows, pred.shape[1], *pred.stride(), *target.stride(), eps),
        MEASURE=measure,
        PACKED_PRED=packed(pred),
        PACKED_TARGET=packed(target),
        COMPUTE=triton_launch.COMPUTE[pred.dtype],
        INDEX=triton_launch.index_type(num_rows + FORWARD_ROWS),
        BLOCK_ROWS=FORWARD_ROWS,
        BLOCK_PROGRAMS=next_power_of_2(programs),
    )
    return loss, saved


def _backward(
    measure: str,
    grad_output: torch.Tensor,
    pred: torch.Tensor,
    target: torch.Tensor,
    saved: torch.Tensor,
    eps: float,
    needs_pred: bool,
    needs_target: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_pred, grad_target = empty_gradients((pred, target), (needs_pred, needs_target))
    num_rows = pred.shape[0] * pred.shape[1]
    if num_rows == 0:
        return grad_pred, grad_target
    triton_launch.launch(
        giou_loss_backward_kernel,
        (cdiv(num_rows, BACKWARD_ROWS),),
        (grad_output, pred, target, saved, grad_pred, grad_target),
        (num_rows, pred.shape[1], *pred.stride(), *target.stride(), eps),
        MEASURE=measure,
        NEEDS_PRED=needs_pred,
        NEEDS_TARGET=needs_target,
        PACKED_PRED=packed(pred),
        PACKED_TARGET=packed(target),
        COMPUTE=triton_launch.COMPUTE[pred.dtype],
        INDEX=triton_launch.index_type(num_rows + BACKWARD_ROWS),
        BLOCK_ROWS=BACKWARD_ROWS,
    )
    return grad_pred, grad_target


def register(definition: Callable[..., Any]) -> Callable[..., Any]:
    """Register the loss by a measure of a pair: "giou", "diou" or "ciou"."""
    measure = definition.__name__.partition("_")[0]
    launches = functools.partial(_forward, measure), functools.partial(_backward, measure)
    return register_loss(definition, "triton", *launches)


giou_loss = register(definition)
