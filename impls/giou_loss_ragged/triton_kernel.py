"""giou_loss_ragged in Triton: reads only the boxes that exist."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from fourfold.backends import workspace
from fourfold.backends.launch import cdiv, first_probe, next_power_of_2, resident
from fourfold.backends.operators import empty_gradients
from fourfold.backends.triton import launch as triton_launch

from ..giou.triton_boxes import grad_of, grad_of_pair, load_boxes, packed, score_of, store_boxes
from .operators import register_loss
from .torch_eager import giou_loss_ragged as definition

# Backward: BLOCK_BOXES is the number of target boxes of a program of one warp, BLOCK_ROWS that of the rows of pred that
# one takes at a time. Most rows have no target box, and the fewer are taken at a time, the more often none has. CHUNKS
# is how often a program takes rows, if all multiprocessors together cannot take all of them at once.
BLOCK_BOXES = 32
BLOCK_ROWS = 64
CHUNKS = 4
WARPS_PER_MULTIPROCESSOR = 32
BLOCK_FORWARD = 128
PROGRAMS_PER_MULTIPROCESSOR = 8


@triton.jit
def last_sample(offsets_ptr, offsets_stride, row, low, step, batch, WIDTH: tl.constexpr):
    """Return the last sample, from `low` on, that begins at or before a row.

    The search probes WIDTH samples at a time, `step` apart, and then widens or narrows the step. For any content of
    offsets the result is in 0 to batch - 1.
    """
    while step > 0:
        probes = low + (tl.arange(0, WIDTH) + 1) * step
        begins = tl.load(offsets_ptr + probes * offsets_stride, mask=probes < batch, other=0)
        passed = tl.sum(((probes < batch) & (begins <= row)).to(tl.int32), axis=0)
        low += passed * step
        step = tl.where(passed == WIDTH, step * WIDTH, step // WIDTH)
    return low


@triton.jit
def samples_of(offsets_ptr, offsets_stride, rows, last, low, batch, WIDTH: tl.constexpr):
    """Return the samples, from `low` on, of rows of target up to `last`, where each begins, and the last sample.

    The rows belong to few samples, mostly. Each finds its own by bisection.
    """
    high = last_sample(offsets_ptr, offsets_stride, last, low, tl.full((), 1, tl.int64), batch, WIDTH)
    samples = tl.zeros_like(rows).to(tl.int64) + low
    begins = tl.zeros_like(samples) + tl.load(offsets_ptr + low * offsets_stride).to(tl.int64)
    left = high - low + 1
    while left > 1:
        half = left // 2
        begins_there = tl.load(offsets_ptr + (samples + half) * offsets_stride).to(tl.int64)
        not_before = begins_there <= rows
        samples = tl.where(not_before, samples + half, samples)
        begins = tl.where(not_before, begins_there, begins)
        left -= half
    return samples, begins, high


@triton.jit(do_not_specialize=["first_step", "max_boxes"])
def giou_loss_ragged_forward_kernel(
    pred_ptr,  # [batch, max_boxes, 4], strided
    target_ptr,  # [total, 4], strided
    offsets_ptr,  # [batch + 1], strided
    loss_ptr,  # []
    partials_ptr,  # [programs] float64: sums
    counter_ptr,  # [1]: number of finished programs
    batch,
    max_boxes,
    total,
    first_step,
    pred_batch_stride,
    pred_box_stride,
    pred_coordinate_stride,
    target_stride,
    target_coordinate_stride,
    offsets_stride,
    eps: tl.float64,  # else Triton rounds it to float32
    MEASURE: tl.constexpr,
    PACKED_PRED: tl.constexpr,
    PACKED_TARGET: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
):
    # One program owns a run of tiles of BLOCK_ROWS target boxes. The last to finish sums all partial results.
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    eps = tl.full((), eps, COMPUTE)
    sums = tl.zeros((BLOCK_ROWS,), COMPUTE)
    run = tl.cdiv(tl.cdiv(total, BLOCK_ROWS), programs) * BLOCK_ROWS
    begin = tl.cast(program, INDEX) * run
    end = tl.minimum(begin + run, total)
    low = last_sample(
        offsets_ptr, offsets_stride, begin, tl.full((), 0, tl.int64), tl.cast(first_step, tl.int64), batch, BLOCK_ROWS
    )
    for first in range(begin, end, BLOCK_ROWS):
        rows = first + tl.arange(0, BLOCK_ROWS)
        mask = rows < end
        target_at = rows.to(tl.int64) * target_stride
        bx1, by1, bx2, by2 = load_boxes(
            target_ptr, rows, target_at, target_coordinate_stride, mask, COMPUTE, PACKED_TARGET
        )
        last = tl.minimum(first + BLOCK_ROWS, end) - 1
        samples, begins, low = samples_of(offsets_ptr, offsets_stride, rows, last, low, batch, BLOCK_ROWS)
        # Clamp, so that invalid offsets cannot lead to a read outside of pred.
        places = tl.minimum(tl.maximum(rows - begins, 0), max_boxes - 1)
        pred_at = samples * pred_batch_stride + places * pred_box_stride
        pred_rows = samples * max_boxes + places
        ax1, ay1, ax2, ay2 = load_boxes(
            pred_ptr, pred_rows, pred_at, pred_coordinate_stride, mask, COMPUTE, PACKED_PRED
        )
        score = score_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, MEASURE)
        sums += tl.where(mask, 1.0 - score, 0.0)

    # Invalid offsets turn the loss into NaN.
    for tile in range(program, tl.cdiv(batch, BLOCK_ROWS), programs):
        samples = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        present = samples < batch
        begins = tl.load(offsets_ptr + samples * offsets_stride, mask=present, other=0)
        ends = tl.load(offsets_ptr + (samples + 1) * offsets_stride, mask=present, other=0)
        fits = (ends >= begins) & (ends - begins <= max_boxes)
        fits = fits & ((samples != 0) | (begins == 0)) & ((samples != batch - 1) | (ends == total))
        sums += tl.where(present & (fits == 0), float("nan"), 0.0).to(COMPUTE)

    tl.store(partials_ptr + program, tl.sum(sums, axis=0).to(tl.float64))
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.debug_barrier()
        ids = tl.arange(0, BLOCK_PROGRAMS)
        # .cg reads from the L2 cache, which has the results of other multiprocessors. This one's L1 may not.
        partials = tl.load(partials_ptr + ids, mask=ids < programs, other=0.0, cache_modifier=".cg")
        tl.store(loss_ptr, (tl.sum(partials, axis=0) / total).to(loss_ptr.dtype.element_ty))
        # Reset the counter for the next launch.
        tl.store(counter_ptr, 0)


# Do not specialize on max_boxes = 1: Triton 3.6 cannot compile the kernel with it as a constant.
@triton.jit(do_not_specialize=["first_step", "max_boxes"])
def giou_loss_ragged_backward_kernel(
    grad_output_ptr,  # []
    pred_ptr,  # [batch, max_boxes, 4], strided
    target_ptr,  # [total, 4], strided
    offsets_ptr,  # [batch + 1], strided
    grad_pred_ptr,  # [batch, max_boxes, 4]
    grad_target_ptr,  # [total, 4]
    batch,
    max_boxes,
    total,
    first_step,
    pred_batch_stride,
    pred_box_stride,
    pred_coordinate_stride,
    target_stride,
    target_coordinate_stride,
    offsets_stride,
    eps: tl.float64,  # else Triton rounds it to float32
    MEASURE: tl.constexpr,
    NEEDS_PRED: tl.constexpr,
    NEEDS_TARGET: tl.constexpr,
    PACKED_PRED: tl.constexpr,
    PACKED_TARGET: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_BOXES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    # One program owns BLOCK_BOXES target boxes, and the rows of pred that they are compared with. Each of the programs
    # behind these owns CHUNKS * BLOCK_ROWS consecutive rows of pred, and writes zeros to those without a target box.
    eps = tl.full((), eps, COMPUTE)
    program = tl.program_id(0).to(INDEX)
    of_targets = tl.cdiv(total, BLOCK_BOXES)
    if program < of_targets:
        grad = tl.zeros((BLOCK_BOXES,), COMPUTE) - tl.load(grad_output_ptr).to(COMPUTE) / tl.full((), total, COMPUTE)
        first = program * BLOCK_BOXES
        boxes = first + tl.arange(0, BLOCK_BOXES)
        mask = boxes < total
        bx1, by1, bx2, by2 = load_boxes(
            target_ptr,
            boxes,
            boxes.to(tl.int64) * target_stride,
            target_coordinate_stride,
            mask,
            COMPUTE,
            PACKED_TARGET,
        )
        low = last_sample(
            offsets_ptr,
            offsets_stride,
            first,
            tl.full((), 0, tl.int64),
            tl.cast(first_step, tl.int64),
            batch,
            BLOCK_BOXES,
        )
        last = tl.minimum(first + BLOCK_BOXES, total) - 1
        samples, begins, _ = samples_of(offsets_ptr, offsets_stride, boxes, last, low, batch, BLOCK_BOXES)
        places = boxes - begins
        # The last two conditions always hold for valid offsets. They keep invalid ones inside pred.
        valid = mask & (places >= 0) & (places < max_boxes)
        rows = samples * max_boxes + places
        pred_at = samples * pred_batch_stride + places * pred_box_stride
        ax1, ay1, ax2, ay2 = load_boxes(pred_ptr, rows, pred_at, pred_coordinate_stride, valid, COMPUTE, PACKED_PRED)
        of_pair = grad_of_pair(grad, ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, MEASURE)
        if NEEDS_PRED:
            x1, y1, x2, y2 = grad_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, of_pair, MEASURE, True)
            store_boxes(grad_pred_ptr, rows, x1, y1, x2, y2, valid)
        if NEEDS_TARGET:
            x1, y1, x2, y2 = grad_of(bx1, by1, bx2, by2, ax1, ay1, ax2, ay2, eps, of_pair, MEASURE, False)
            store_boxes(grad_target_ptr, boxes, x1, y1, x2, y2, mask)
    else:
        zero = tl.zeros((BLOCK_ROWS,), COMPUTE)
        num_rows = tl.cast(batch, INDEX) * max_boxes
        for chunk in range(CHUNKS):
            begin = ((program - of_targets) * CHUNKS + chunk) * BLOCK_ROWS
            if begin < num_rows:
                rows = begin + tl.arange(0, BLOCK_ROWS)
                mask = rows < num_rows
                sample = (begin // max_boxes).to(tl.int64)
                place = begin - sample * max_boxes
                count = tl.load(offsets_ptr + (sample + 1) * offsets_stride).to(tl.int64)
                count -= tl.load(offsets_ptr + sample * offsets_stride).to(tl.int64)
                if (place < count) | (place + BLOCK_ROWS > max_boxes):
                    # Some row has a target box, or belongs to another sample.
                    samples = rows // max_boxes
                    offsets_at = offsets_ptr + samples.to(tl.int64) * offsets_stride
                    counts = tl.load(offsets_at + offsets_stride, mask=mask, other=0).to(tl.int64)
                    counts -= tl.load(offsets_at, mask=mask, other=0).to(tl.int64)
                    mask = mask & (rows - samples * max_boxes >= counts)
                store_boxes(grad_pred_ptr, rows, zero, zero, zero, zero, mask)


def _scalars(
    pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float, probes: int
) -> tuple[float, ...]:
    """Return the sizes, the first step of a search with this many probes, the strides and eps."""
    (batch, max_boxes, _), total = pred.shape, target.shape[0]
    strides = *pred.stride(), *target.stride(), offsets.stride(0)
    return batch, max_boxes, total, first_probe(batch, probes), *strides, eps


def _forward(measure: str, pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float) -> torch.Tensor:
    device, batch, total = pred.device, pred.shape[0], target.shape[0]
    loss = torch.empty((), dtype=pred.dtype, device=device)
    if total == 0:
        return loss.zero_()
    programs = min(cdiv(max(total, batch), BLOCK_FORWARD), resident(device, PROGRAMS_PER_MULTIPROCESSOR))
    triton_launch.launch(
        giou_loss_ragged_forward_kernel,
        (programs,),
        (
            pred,
            target,
            offsets,
            loss,
            torch.empty(programs, dtype=torch.float64, device=device),
            workspace.counter(device),
        ),
        _scalars(pred, target, offsets, eps, BLOCK_FORWARD),
        MEASURE=measure,
        PACKED_PRED=packed(pred),
        PACKED_TARGET=packed(target),
        COMPUTE=triton_launch.COMPUTE[pred.dtype],
        INDEX=triton_launch.index_type(total + batch + BLOCK_FORWARD),
        BLOCK_ROWS=BLOCK_FORWARD,
        BLOCK_PROGRAMS=next_power_of_2(programs),
    )
    return loss


def _backward(
    measure: str,
    grad_output: torch.Tensor,
    pred: torch.Tensor,
    target: torch.Tensor,
    offsets: torch.Tensor,
    eps: float,
    needs_pred: bool,
    needs_target: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_pred, grad_target = empty_gradients((pred, target), (needs_pred, needs_target))
    (batch, max_boxes, _), total = pred.shape, target.shape[0]
    if total == 0:
        return grad_pred.zero_(), grad_target
    num_rows = batch * max_boxes if needs_pred else 0  # to write zeros to
    at_once = cdiv(num_rows, BLOCK_ROWS) <= resident(pred.device, WARPS_PER_MULTIPROCESSOR)
    chunks = 1 if at_once else CHUNKS
    triton_launch.launch(
        giou_loss_ragged_backward_kernel,
        (cdiv(total, BLOCK_BOXES) + cdiv(num_rows, chunks * BLOCK_ROWS),),
        (grad_output, pred, target, offsets, grad_pred, grad_target),
        _scalars(pred, target, offsets, eps, BLOCK_BOXES),
        MEASURE=measure,
        NEEDS_PRED=needs_pred,
        NEEDS_TARGET=needs_target,
        PACKED_PRED=packed(pred),
        PACKED_TARGET=packed(target),
        COMPUTE=triton_launch.COMPUTE[pred.dtype],
        INDEX=triton_launch.index_type(max(total, batch * max_boxes) + chunks * BLOCK_ROWS),
        BLOCK_BOXES=BLOCK_BOXES,
        BLOCK_ROWS=BLOCK_ROWS,
        CHUNKS=chunks,
        num_warps=1,
    )
    return grad_pred, grad_target


def register(definition: Callable[..., Any]) -> Callable[..., Any]:
    """Register the loss by a measure of a pair: "giou", "diou" or "ciou"."""
    measure = definition.__name__.partition("_")[0]
    launches = functools.partial(_forward, measure), functools.partial(_backward, measure)
    return register_loss(definition, "triton", *launches)


giou_loss_ragged = register(definition)
