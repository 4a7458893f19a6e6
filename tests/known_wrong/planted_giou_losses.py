"""Planted faults in giou_loss and giou_loss_ragged: edits of their Triton versions, and small CUDA C++ kernels."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fourfold.properties import giou_loss as padded_properties
from fourfold.properties import giou_loss_ragged as ragged_properties
from triton import InterpreterError

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.repeatability import repeats_bit_for_bit
from fourfold.numerics.dtypes import DType

from .edits import Edits
from .generic import with_torchs_gradient
from .planted import Fault, cuda_fault, named, one_row, ragged_row
from .planted_cuda import Planted
from .steps import Implementation

Tensor = torch.Tensor
KERNELS = Planted(Path(__file__).with_suffix(".cu"), "padded_kernel", "ragged_rows_kernel", "ragged_samples_kernel")
THREADS = 64
BY_SAMPLES = (
    "BOXES_PAST_A_WARP", "NEIGHBOURS_BOX", "SHUFFLE_IN_A_BRANCH", "SHUFFLE_OF_ACTIVE_LANES", "ADDED_WITHOUT_ATOMICS",
    "ADDED_ATOMICALLY", "SLOT_UNWRITTEN", "RIGHT",
)  # fmt: skip


def padded_in_cuda(fault: str = "RIGHT") -> Implementation:
    """Return giou_loss in CUDA C++ for float32, with a fault."""

    def forward(pred: Tensor, target: Tensor, eps: float = 1e-5) -> Tensor:
        rows = pred.shape[0] * pred.shape[1]
        blocks = min(-(-rows // THREADS), 4)
        sums = torch.empty((2, blocks * THREADS), device=pred.device)
        KERNELS.launch(
            "padded_kernel", fault, blocks, THREADS, pred.contiguous(), target.contiguous(), *sums, rows, eps
        )
        total, count = sums.sum(1)
        return total / count.clamp(min=1)

    return with_torchs_gradient("giou_loss", forward)


def ragged_in_cuda(fault: str = "RIGHT") -> Implementation:
    """Return giou_loss_ragged in CUDA C++ for float32, with a fault that decides between samples and rows."""

    def forward(pred: Tensor, target: Tensor, offsets: Tensor, eps: float = 1e-5) -> Tensor:
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

    return with_torchs_gradient("giou_loss_ragged", forward)


def full_warps(dtype: DType) -> Any:
    """Return samples of 32 boxes: each lane of a warp has exactly one box."""
    return ragged_properties.example([32, 32], 32)(dtype)


def one_full_sample(dtype: DType) -> Any:
    """Return one sample with a box in every slot of pred."""
    return ragged_properties.example([3], 3, np.int32)(dtype)


# fmt: off
LOSSES, SUM = "sums += tl.where(valid, 1.0 - score, 0.0) =>", "tl.sum(sums, axis=0).to(tl.float64)"


def _padded_in_triton() -> tuple[Fault, ...]:
    of, one = Edits("giou_loss", "triton"), {"right_on": one_row}
    return (
        of("rows_past_the_end_count", "counts += valid.to( => counts += (valid | (rows >= num_rows)).to(",
           right_on=padded_properties.article_batch(64, 8)),
        of("valid_by_width", "(by2 > 0) => (bx2 > bx1)", **one),
        of("masked_by_a_product", f"{LOSSES} sums += (1.0 - score) * valid.to(COMPUTE)", **one),
        of("sum_in_half", f"{SUM} => tl.sum(sums.to(tl.float16), axis=0).to(tl.float64)", right_on="identical_boxes"),
        of("sums_in_one_place", f"partials_ptr + program, {SUM} => partials_ptr, {SUM}", **one),
        of("mean_of_the_programs_means", f"{SUM} => {SUM} / tl.maximum(tl.sum(counts, axis=0), 1) / programs",
           "(total / tl.maximum(count, 1.0)).to( => total.to(", **one),
    )


def _ragged_in_triton() -> tuple[Fault, ...]:
    of, full, places = Edits("giou_loss_ragged", "triton"), {"right_on": one_full_sample}, "sums += tl.where(mask =>"
    return (
        of("offsets_contiguous_assumed", "offsets.stride(0),\n            eps => 1,\n            eps", **full,
           examples=named(ragged_properties, "offsets_strided_over_several_samples")),
        of("boxes_past_a_block", f"{places} sums += tl.where(mask & (places < 64)", **full),
        of("last_box_of_many_left_out",
           f"{places} last = rows + 1 == tl.load(offsets_ptr + (samples + 1) * offsets_stride)\n"
           "        sums += tl.where(mask & ((places == 0) | (last == 0))", right_on=ragged_row),
        of("pred_taken_as_packed", "pred_rows = samples * max_boxes + places => pred_rows = rows",
           "pred_at = samples * pred_batch_stride + places * pred_box_stride => pred_at = rows * pred_box_stride",
           **full),
        of("target_taken_as_padded", "        score = score_of( =>         bx1, by1, bx2, by2 = load_boxes(target_ptr,"
           " pred_rows, pred_rows * target_stride, target_coordinate_stride, mask, COMPUTE, PACKED_TARGET)\n"
           "        score = score_of(", raises=InterpreterError, says="OutOfBounds", only_on="cpu", **full),
        of("y2_not_above_0_taken_for_padding", f"{places} sums += tl.where(mask & (by2 > 0)", right_on=ragged_row,
           examples=named(ragged_properties, "negative_y2_counts")),
        of("rows_past_the_sample_count", f"{places} sums += tl.where(mask | True",
           right_on=ragged_properties.example([128, 128], 128)),
    )


# fmt: on
def _padded_in_cuda() -> tuple[Fault, ...]:
    of_cuda = functools.partial(cuda_fault, "giou_loss", padded_in_cuda, right_on=one_row)
    many = {name: padded_properties.examples[name] for name in ("articles_batch_of_32", "thousands_in_one_sample")}
    return (
        of_cuda("first_strip_only", examples=many),
        of_cuda("sum_in_half", right_on="identical_boxes"),
        of_cuda("valid_by_pred"),
    )


def _ragged_in_cuda() -> tuple[Fault, ...]:
    of_cuda = functools.partial(cuda_fault, "giou_loss_ragged", ragged_in_cuda)
    return (
        of_cuda("bisection_to_the_left", right_on=one_full_sample),
        of_cuda("pred_taken_as_packed", right_on=one_full_sample),
        of_cuda("boxes_past_a_warp", right_on=one_full_sample),
        of_cuda(
            "neighbours_box",
            right_on=one_full_sample,
            examples=named(ragged_properties, "offsets_strided_over_several_samples"),
        ),
        of_cuda(
            "shuffle_in_a_branch",
            right_on=full_warps,
            only_on="cpu",
            source="https://github.com/NVIDIA/cuda-samples/issues/398",
        ),
        of_cuda("shuffle_of_active_lanes", right_on=full_warps, only_on="cpu"),
        of_cuda("added_without_atomics", cuda_on_cpu.Race, right_on=one_full_sample),
        of_cuda(
            "added_atomically",
            check=repeats_bit_for_bit,
            says="output differs between two calls",
            right_on=one_full_sample,
            only_on="cpu",
        ),
        of_cuda(
            "slot_unwritten",
            check=memory_is_respected,
            says="depending on memory|was never written",
            right_on=one_full_sample,
        ),
    )


FAULTS = (*_padded_in_triton(), *_padded_in_cuda(), *_ragged_in_triton(), *_ragged_in_cuda())
