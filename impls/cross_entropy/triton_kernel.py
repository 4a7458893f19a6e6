"""cross_entropy in Triton: forward reads the logits once, backward once more."""

import torch
import triton
import triton.language as tl

from fourfold.backends import workspace
from fourfold.backends.launch import cdiv, next_power_of_2
from fourfold.backends.triton import launch as triton_launch

from .operators import Reduced, register_cross_entropy

# Bytes of the compute type of a piece of a row, or of several short rows.
PIECE_BYTES = 16384
# The fewest and the most losses that are added at once, and the most in the last program of forward, for each warp.
FEWEST_REDUCED, MOST_REDUCED, REDUCED_BY_WARP = 1024, 4096, 512


@triton.jit
def load_logits(logits_ptr, rows, columns, counted, classes, row_stride, class_stride, COMPUTE: tl.constexpr):
    """Load some classes of some rows, with -inf past the classes and in rows that are ignored."""
    at = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * class_stride
    mask = counted[:, None] & (columns < classes)[None, :]
    return tl.load(logits_ptr + at, mask=mask, other=float("-inf")).to(COMPUTE)


@triton.jit(do_not_specialize=["num_rows"])
def cross_entropy_reduce_kernel(
    losses_ptr,  # [rows]
    target_ptr,  # [rows], strided
    output_ptr,  # a scalar
    scale_ptr,  # [1], of a mean
    num_rows,
    target_stride,
    ignore_index,
    MEAN: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # One program owns all rows: that of a launch, or the last one of forward to finish.
    sums = tl.zeros((BLOCK_ROWS,), COMPUTE)
    counts = tl.zeros((BLOCK_ROWS,), tl.int64)
    for start in range(0, num_rows, BLOCK_ROWS):
        rows = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        # .cg reads from the L2 cache, which has the results of other multiprocessors. This one's L1 may not.
        sums += tl.load(losses_ptr + rows, mask=rows < num_rows, other=0.0, cache_modifier=".cg")
        if MEAN:
            target = tl.load(target_ptr + rows * target_stride, mask=rows < num_rows, other=0).to(tl.int64)
            counts += ((rows < num_rows) & (target != ignore_index)).to(tl.int64)
    total = tl.sum(sums, axis=0)
    if MEAN:
        count = tl.sum(counts, axis=0).to(COMPUTE)
        tl.store(scale_ptr, 1.0 / count)
        total = total / count
    tl.store(output_ptr, total.to(output_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"])
def cross_entropy_forward_kernel(
    logits_ptr,  # [rows, classes], strided
    target_ptr,  # [rows], strided
    losses_ptr,  # [rows]
    statistics_ptr,  # [2, rows]: maxima, and reciprocal sums of exponentials
    output_ptr,  # a scalar, if REDUCED_ROWS > 0
    scale_ptr,  # [1], of a mean
    counter_ptr,  # [1]: number of finished programs, unless ALONE
    num_rows,
    classes,
    row_stride,
    class_stride,
    target_stride,
    ignore_index,
    label_smoothing: tl.float64,  # else Triton rounds it to float32
    SMOOTHED: tl.constexpr,
    MEAN: tl.constexpr,
    ALONE: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CLASSES: tl.constexpr,
    REDUCED_ROWS: tl.constexpr,
):
    # One program owns BLOCK_ROWS consecutive rows, which it reads in pieces of BLOCK_CLASSES classes. The last program
    # to finish reduces the losses of few rows, REDUCED_ROWS at once.
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    target = tl.load(target_ptr + rows.to(tl.int64) * target_stride, mask=rows < num_rows, other=0).to(tl.int64)
    counted = (rows < num_rows) & (target != ignore_index)
    valid = counted & (target >= 0) & (target < classes)
    at = rows.to(tl.int64) * row_stride + target * class_stride
    expected = tl.load(logits_ptr + at, mask=valid, other=float("nan")).to(COMPUTE)
    largest = tl.full((BLOCK_ROWS,), float("-inf"), COMPUTE)
    total = tl.zeros((BLOCK_ROWS,), COMPUTE)
    distance = tl.zeros((BLOCK_ROWS,), COMPUTE)
    for start in range(0, classes, BLOCK_CLASSES):
        columns = start + tl.arange(0, BLOCK_CLASSES)
        x = load_logits(logits_ptr, rows, columns, counted, classes, row_stride, class_stride, COMPUTE)
        new = tl.maximum(largest, tl.max(x, axis=1))
        # A row that has only seen -inf has no terms yet. Subtracting any finite number makes them 0.
        reference = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - reference) + tl.sum(tl.exp(x - reference[:, None]), axis=1)
        if SMOOTHED:
            # Sum distances from the maximum, not logits, whose mean would lose the digits of a large offset.
            seen = tl.full((), start, COMPUTE)
            moved = tl.where(largest == float("-inf"), 0.0, (reference - largest) * seen)
            apart = tl.where((columns < classes)[None, :], x - reference[:, None], 0.0)
            distance += tl.sum(apart, axis=1) - moved
        largest = new
    expected -= largest
    if SMOOTHED:
        smoothing = tl.full((), label_smoothing, COMPUTE)
        expected = (1.0 - smoothing) * expected + smoothing * (distance / tl.full((), classes, COMPUTE))
    losses = tl.where(counted, tl.log(total) - expected, 0.0)
    tl.store(losses_ptr + rows.to(tl.int64), losses.to(losses_ptr.dtype.element_ty), mask=rows < num_rows)
    tl.store(statistics_ptr + rows.to(tl.int64), largest, mask=rows < num_rows)
    tl.store(statistics_ptr + num_rows + rows.to(tl.int64), 1.0 / total, mask=rows < num_rows)
    if REDUCED_ROWS > 0:
        tl.debug_barrier()
        last = True
        if not ALONE:
            last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
        if last:
            tl.debug_barrier()
            cross_entropy_reduce_kernel(
                losses_ptr,
                target_ptr,
                output_ptr,
                scale_ptr,
                num_rows,
                target_stride,
                ignore_index,
                MEAN,
                COMPUTE,
                REDUCED_ROWS,
            )
            if not ALONE:
                tl.store(counter_ptr, 0)  # for the next launch


@triton.jit(do_not_specialize=["num_rows"])
def cross_entropy_backward_kernel(
    grad_output_ptr,  # [rows], strided, or a scalar with stride 0
    logits_ptr,  # [rows, classes], strided
    target_ptr,  # [rows], strided
    statistics_ptr,  # [2, rows]
    scale_ptr,  # [1], of a mean
    grad_logits_ptr,  # [rows, classes]
    num_rows,
    classes,
    grad_output_stride,
    row_stride,
    class_stride,
    target_stride,
    ignore_index,
    label_smoothing: tl.float64,
    MEAN: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CLASSES: tl.constexpr,
):
    # One program owns one piece of BLOCK_CLASSES classes of BLOCK_ROWS consecutive rows.
    pieces = tl.cdiv(classes, BLOCK_CLASSES)
    tile = tl.program_id(0) // pieces
    rows = tile.to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = (tl.program_id(0) - tile * pieces) * BLOCK_CLASSES + tl.arange(0, BLOCK_CLASSES)
    here = rows < num_rows
    at = rows.to(tl.int64)
    target = tl.load(target_ptr + at * target_stride, mask=here, other=0).to(tl.int64)
    counted = here & (target != ignore_index)
    x = load_logits(logits_ptr, rows, columns, counted, classes, row_stride, class_stride, COMPUTE)
    largest = tl.load(statistics_ptr + at, mask=here, other=0.0)
    reciprocal = tl.load(statistics_ptr + num_rows + at, mask=here, other=0.0)
    grad = tl.load(grad_output_ptr + at * grad_output_stride, mask=here, other=0.0).to(COMPUTE)
    if MEAN:
        grad = grad * tl.load(scale_ptr)
    smoothing = tl.full((), label_smoothing, COMPUTE)
    slope = tl.exp(x - largest[:, None]) * reciprocal[:, None] - smoothing / tl.full((), classes, COMPUTE)
    slope = tl.where(columns[None, :] == target[:, None], slope - (1.0 - smoothing), slope)
    grad_x = tl.where(counted[:, None], slope * grad[:, None], 0.0).to(grad_logits_ptr.dtype.element_ty)
    to = at[:, None] * classes + columns[None, :]
    tl.store(grad_logits_ptr + to, grad_x, mask=here[:, None] & (columns < classes)[None, :])


def blocks(classes: int, compute_size: int) -> tuple[int, int]:
    """Return rows and classes that a program holds at once."""
    held = PIECE_BYTES // compute_size
    block_classes = min(next_power_of_2(classes), held)
    return max(1, min(held // 4 // block_classes, 64)), block_classes


def _forward(
    losses: torch.Tensor,
    statistics: torch.Tensor,
    reduced: Reduced | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    num_rows, classes = logits.shape
    block_rows, block_classes = blocks(classes, statistics.element_size())
    num_warps, programs = max(block_rows * block_classes // 1024, 1), cdiv(num_rows, block_rows)
    output, scale = (losses, losses) if reduced is None else reduced
    alone = reduced is None or programs == 1
    triton_launch.launch(
        cross_entropy_forward_kernel,
        (programs,),
        (logits, target, losses, statistics, output, scale, losses if alone else workspace.counter(logits.device)),
        (num_rows, classes, *logits.stride(), target.stride(0), ignore_index, label_smoothing),
        SMOOTHED=label_smoothing > 0,
        MEAN=reduced is not None and scale.shape[0] > 0,
        ALONE=alone,
        COMPUTE=triton_launch.COMPUTE[logits.dtype],
        INDEX=triton_launch.index_type(num_rows + block_rows),
        BLOCK_ROWS=block_rows,
        BLOCK_CLASSES=block_classes,
        REDUCED_ROWS=0 if reduced is None else REDUCED_BY_WARP * num_warps,
        num_warps=num_warps,
    )


def _reduce(reduced: Reduced, losses: torch.Tensor, target: torch.Tensor, ignore_index: int) -> None:
    output, scale = reduced
    triton_launch.launch(
        cross_entropy_reduce_kernel,
        (1,),
        (losses, target, output, scale),
        (losses.shape[0], target.stride(0), ignore_index),
        MEAN=scale.shape[0] > 0,
        COMPUTE=triton_launch.COMPUTE[losses.dtype],
        BLOCK_ROWS=min(max(next_power_of_2(losses.shape[0]), FEWEST_REDUCED), MOST_REDUCED),
        num_warps=16,
    )


def _backward(
    grad_logits: torch.Tensor,
    grad_output: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    scale: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    num_rows, classes = logits.shape
    block_rows, block_classes = blocks(classes, statistics.element_size())
    grad_stride = grad_output.stride(0) if grad_output.ndim else 0
    triton_launch.launch(
        cross_entropy_backward_kernel,
        (cdiv(num_rows, block_rows) * cdiv(classes, block_classes),),
        (grad_output, logits, target, statistics, scale, grad_logits),
        (num_rows, classes, grad_stride, *logits.stride(), target.stride(0), ignore_index, label_smoothing),
        MEAN=scale.shape[0] > 0,
        COMPUTE=triton_launch.COMPUTE[logits.dtype],
        INDEX=triton_launch.index_type(num_rows + block_rows),
        BLOCK_ROWS=block_rows,
        BLOCK_CLASSES=block_classes,
        num_warps=4,
    )


cross_entropy = register_cross_entropy("triton", _forward, _reduce, _backward)
