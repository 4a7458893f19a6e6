"""Planted faults in giou_loss and giou_loss_ragged, in small Triton and CUDA C++ kernels; gradients are torch's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from fourfold.properties import giou_loss as padded_properties
from fourfold.properties import giou_loss_ragged as ragged_properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.repeatability import repeats_bit_for_bit
from fourfold.numerics.dtypes import DType

from .planted import Fault, kernel_faults, named, one_row, ragged_row
from .planted_cuda import Planted
from .planted_triton import load_box, score_of
from .steps import Implementation, loss, wire

Tensor = torch.Tensor


def wired(operation: str, forward: Callable[..., Tensor]) -> Implementation:
    """Make an implementation from a forward pass. Its gradient is that of the right steps in torch."""
    right = loss(operation)

    def backward(grad_output: Tensor, pred: Tensor, target: Tensor, *rest: Any) -> tuple:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (pred, target)]
            others = {"offsets": rest[0]} if len(rest) > 1 else {}
            output = right(pred=leaves[0], target=leaves[1], **others, eps=rest[-1])
            return torch.autograd.grad(output, leaves, grad_output)

    return wire(operation, forward, backward)


@triton.jit
def padded_kernel(pred_ptr, target_ptr, sums_ptr, counts_ptr, n, eps, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    # One program owns BLOCK consecutive rows, and stores the sum of their losses and the number of valid rows.
    program = tl.program_id(0)
    rows = program * BLOCK + tl.arange(0, BLOCK)
    mask = rows < n
    eps = tl.full((), eps, tl.float32)
    ax1, ay1, ax2, ay2 = load_box(pred_ptr, rows, 4, 1, mask, "", tl.float32)
    bx1, by1, bx2, by2 = load_box(target_ptr, rows, 4, 1, mask, "", tl.float32)
    losses = 1.0 - score_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, "")
    valid = by2 > 0
    if FAULT == "rows_past_the_end_count":
        valid = (by2 > 0) | (rows >= n)
    if FAULT == "valid_by_width":
        valid = bx2 > bx1
    if FAULT == "masked_by_a_product":
        losses = losses * valid.to(tl.float32)
    else:
        losses = tl.where(valid, losses, 0.0)
    total = tl.sum(losses, axis=0)
    if FAULT == "sum_in_half":
        total = tl.sum(losses.to(tl.float16), axis=0).to(tl.float32)
    count = tl.sum(valid.to(tl.float32), axis=0)
    slot = program
    if FAULT == "sums_in_one_place":
        slot = program * 0
    tl.store(sums_ptr + slot, total)
    tl.store(counts_ptr + slot, count)


@triton.jit
def ragged_kernel(
    pred_ptr, target_ptr, offsets_ptr, sums_ptr, max_boxes, offset_stride, eps, FAULT: tl.constexpr, BLOCK: tl.constexpr
):
    # One program owns one sample, and stores the sum of its losses.
    sample = tl.program_id(0).to(tl.int64)
    if FAULT == "offsets_contiguous_assumed":
        offset_stride = 1
    first = tl.load(offsets_ptr + sample * offset_stride).to(tl.int64)
    end = tl.load(offsets_ptr + (sample + 1) * offset_stride).to(tl.int64)
    eps = tl.full((), eps, tl.float32)
    if FAULT == "boxes_past_a_block":
        end = tl.minimum(end, first + BLOCK)
    if FAULT == "last_box_of_many_left_out":
        end = tl.where(end > first + 1, end - 1, end)
    start_of_pred = sample * max_boxes
    if FAULT == "pred_taken_as_packed":
        start_of_pred = first
    start_of_target = first
    if FAULT == "target_taken_as_padded":
        start_of_target = sample * max_boxes
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, end - first, BLOCK):
        boxes = start + tl.arange(0, BLOCK)
        mask = boxes < end - first
        ax1, ay1, ax2, ay2 = load_box(pred_ptr, start_of_pred + boxes, 4, 1, mask, "", tl.float32)
        bx1, by1, bx2, by2 = load_box(target_ptr, start_of_target + boxes, 4, 1, mask, "", tl.float32)
        losses = 1.0 - score_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, "")
        if FAULT == "y2_not_above_0_taken_for_padding":
            mask = mask & (by2 > 0)
        if FAULT != "rows_past_the_sample_count":
            losses = tl.where(mask, losses, 0.0)
        total += tl.sum(losses, axis=0)
    tl.store(sums_ptr + sample, total)


def padded_in_triton(fault: str = "") -> Implementation:
    """Return giou_loss in Triton for float32, with a fault."""

    def forward(pred: Tensor, target: Tensor, eps: float) -> Tensor:
        rows = pred.shape[0] * pred.shape[1]
        programs = triton.cdiv(rows, 64)
        sums = torch.zeros((2, max(programs, 1)), device=pred.device)
        if rows:
            with triton_launch.on(pred.device):
                padded_kernel[(programs,)](
                    pred.contiguous(), target.contiguous(), sums[0], sums[1], rows, eps, FAULT=fault, BLOCK=64
                )
        total, count = sums.sum(1)
        if fault == "mean_of_the_programs_means":
            return (sums[0] / sums[1].clamp(min=1)).mean()
        return total / count.clamp(min=1)

    return wired("giou_loss", forward)


def ragged_in_triton(fault: str = "") -> Implementation:
    """Return giou_loss_ragged in Triton for float32, with a fault."""

    def forward(pred: Tensor, target: Tensor, offsets: Tensor, eps: float) -> Tensor:
        batch, max_boxes = pred.shape[:2]
        sums = torch.zeros(max(batch, 1), device=pred.device)
        if len(target):
            with triton_launch.on(pred.device):
                ragged_kernel[(batch,)](
                    pred.contiguous(), target.contiguous(), offsets, sums, max_boxes, offsets.stride(0), eps,
                    FAULT=fault, BLOCK=64,
                )  # fmt: skip
        return sums.sum() / max(len(target), 1)

    return wired("giou_loss_ragged", forward)


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "padded_kernel", "ragged_rows_kernel", "ragged_samples_kernel")
THREADS = 64
BY_SAMPLES = (
    "BOXES_PAST_A_WARP", "NEIGHBOURS_BOX", "SHUFFLE_IN_A_BRANCH", "SHUFFLE_OF_ACTIVE_LANES", "ADDED_WITHOUT_ATOMICS",
    "ADDED_ATOMICALLY", "SLOT_UNWRITTEN", "RIGHT",
)  # fmt: skip


def padded_in_cuda(fault: str = "RIGHT") -> Implementation:
    """Return giou_loss in CUDA C++ for float32, with a fault."""

    def forward(pred: Tensor, target: Tensor, eps: float) -> Tensor:
        rows = pred.shape[0] * pred.shape[1]
        blocks = min(-(-rows // THREADS), 4)
        sums = torch.empty((2, blocks * THREADS), device=pred.device)
        KERNELS.launch(
            "padded_kernel", fault, blocks, THREADS, pred.contiguous(), target.contiguous(), *sums, rows, eps
        )
        total, count = sums.sum(1)
        return total / count.clamp(min=1)

    return wired("giou_loss", forward)


def ragged_in_cuda(fault: str = "RIGHT") -> Implementation:
    """Return giou_loss_ragged in CUDA C++ for float32, with a fault that decides between samples and rows."""

    def forward(pred: Tensor, target: Tensor, offsets: Tensor, eps: float) -> Tensor:
        (batch, max_boxes), total = pred.shape[:2], len(target)
        if not total:
            return pred.new_zeros(())
        inputs = pred.contiguous(), target.contiguous(), offsets.long().contiguous()
        if fault not in BY_SAMPLES:
            losses = torch.empty(total, device=pred.device)
            blocks = -(-total // THREADS)
            KERNELS.launch("ragged_rows_kernel", fault, blocks, THREADS, *inputs, losses, batch, total, max_boxes, eps)
            return losses.sum() / total
        sums = torch.empty(batch, device=pred.device) if fault == "SLOT_UNWRITTEN" else pred.new_zeros(batch)
        blocks = -(-batch * 32 // THREADS)
        KERNELS.launch("ragged_samples_kernel", fault, blocks, THREADS, *inputs, sums, batch, max_boxes, eps)
        return sums.sum() / total

    return wired("giou_loss_ragged", forward)


def full_warps(dtype: DType) -> Any:
    """Return samples of 32 boxes: each lane of a warp has exactly one box."""
    return ragged_properties.example([32, 32], 32)(dtype)


def one_full_sample(dtype: DType) -> Any:
    """Return one sample with a box in every slot of pred."""
    return ragged_properties.example([3], 3, np.int32)(dtype)


def _padded() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("giou_loss", padded_in_triton, padded_in_cuda, right_on=one_row)
    many = {name: padded_properties.examples[name] for name in ("articles_batch_of_32", "thousands_in_one_sample")}
    return (
        of_triton("rows_past_the_end_count", right_on=padded_properties.article_batch(8, 8)),
        of_triton("valid_by_width"),
        of_triton("masked_by_a_product"),
        of_triton("sum_in_half", right_on="identical_boxes"),
        of_triton("sums_in_one_place"),
        of_triton("mean_of_the_programs_means"),
        of_cuda("first_strip_only", examples=many),
        of_cuda("sum_in_half", right_on="identical_boxes"),
        of_cuda("valid_by_pred"),
    )


def _ragged() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("giou_loss_ragged", ragged_in_triton, ragged_in_cuda, right_on=one_full_sample)

    return (
        of_triton(
            "offsets_contiguous_assumed",
            astray=True,
            examples=named(ragged_properties, "offsets_strided_over_several_samples"),
        ),
        of_triton("boxes_past_a_block"),
        of_triton("last_box_of_many_left_out", right_on=ragged_row),
        of_triton("pred_taken_as_packed"),
        of_triton("target_taken_as_padded", astray=True),
        of_triton(
            "y2_not_above_0_taken_for_padding",
            right_on=ragged_row,
            examples=named(ragged_properties, "negative_y2_counts"),
        ),
        of_triton("rows_past_the_sample_count", right_on=ragged_properties.example([64, 64], 64)),
        of_cuda("bisection_to_the_left", right_on=one_full_sample),
        of_cuda("pred_taken_as_packed"),
        of_cuda("boxes_past_a_warp"),
        of_cuda("neighbours_box", examples=named(ragged_properties, "offsets_strided_over_several_samples")),
        of_cuda(
            "shuffle_in_a_branch",
            right_on=full_warps,
            only_on_cpu=True,
            source="https://github.com/NVIDIA/cuda-samples/issues/398",
        ),
        of_cuda("shuffle_of_active_lanes", right_on=full_warps, only_on_cpu=True),
        of_cuda("added_without_atomics", cuda_on_cpu.Race),
        of_cuda(
            "added_atomically",
            check=repeats_bit_for_bit,
            says="output differs between two calls",
            only_on_cpu=True,
        ),
        of_cuda("slot_unwritten", check=memory_is_respected, says="depending on memory|was never written"),
    )


FAULTS = (*_padded(), *_ragged())
