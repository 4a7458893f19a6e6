"""Planted faults in giou_loss and giou_loss_ragged: edits of their versions in Triton and CUDA C++."""

from typing import Any

import numpy as np
from fourfold.properties import giou_loss as padded_properties
from fourfold.properties import giou_loss_ragged as ragged_properties
from triton import InterpreterError

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.repeatability import repeats_bit_for_bit
from fourfold.numerics.dtypes import DType

from .edits import Edits
from .planted import Fault, named, one_row, ragged_row, thousand_rows


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
        of("offsets_contiguous_assumed", "*target.stride(), offsets.stride(0) => *target.stride(), 1", **full,
           examples=named(ragged_properties, "offsets_strided_over_several_samples")),
        of("boxes_past_a_block", f"{places} sums += tl.where(mask & (places < 64)", **full),
        of("last_box_of_many_left_out",
           f"{places} last = rows + 1 == tl.load(offsets_ptr + (samples + 1) * offsets_stride)\n"
           "        sums += tl.where(mask & ((places == 0) | (last == 0))", right_on=ragged_row),
        of("pred_taken_as_packed", "pred_rows = samples * max_boxes + places => pred_rows = rows",
           "pred_at = samples * pred_batch_stride + places * pred_box_stride =>2 pred_at = rows * pred_box_stride",
           **full),
        of("target_taken_as_padded", "        score = score_of( =>         bx1, by1, bx2, by2 = load_boxes(target_ptr,"
           " pred_rows, pred_rows * target_stride, target_coordinate_stride, mask, COMPUTE, PACKED_TARGET)\n"
           "        score = score_of(", raises=InterpreterError, says="OutOfBounds", only_on="cpu", **full),
        of("y2_not_above_0_taken_for_padding", f"{places} sums += tl.where(mask & (by2 > 0)", right_on=ragged_row,
           examples=named(ragged_properties, "negative_y2_counts")),
        of("rows_past_the_sample_count", f"{places} sums += tl.where(mask | True",
           right_on=ragged_properties.example([128, 128], 128)),
    )


LOSS = "C(1) - score_of<MEASURE>(converted<C>(a[k]), converted<C>(b[k]), least)"
ADDED = f"sum += {LOSS}; =>"
WARP_SUM = "    over_lanes(32); =>     if (mine.sum != 0) over_lanes(32);"
MEAN = "giou_loss/mean.cuh: "
BARRIER = f"{MEAN}of_warp[threadIdx.x / 32] = mine;\n    __syncthreads();\n => of_warp[threadIdx.x / 32] = mine;\n"
ATOMIC = (
    "    SumAndCount all{{(double)sum, {0}}};\n =>     SumAndCount all{{(double)sum, {0}}};\n"
    "    __shared__ float added;\n    if (threadIdx.x == 0) added = 0;\n    __syncthreads();\n"
    "    atomicAdd(&added, float(sum));\n    __syncthreads();\n    all.sum = threadIdx.x ? 0 : added;\n"
)


def _padded_in_cuda() -> tuple[Fault, ...]:
    of, one = Edits("giou_loss", "cuda"), {"right_on": one_row}
    many = {name: padded_properties.examples[name] for name in ("articles_batch_of_32", "thousands_in_one_sample")}
    return (
        of("first_strip_only", "strip * STRIP < num_rows; => strip * STRIP < min(num_rows, warps * STRIP);",
           examples=many, **one),
        of("sum_in_half", f"{ADDED} sum = C(__half(float(sum + {LOSS})));", right_on="identical_boxes"),
        of("valid_by_pred", "            valid[k] = C(b[k].y2) > C(0);\n            if (valid[k]) =>"
           "             if (first + 32 * k < num_rows) a[k] = preds[first + 32 * k];\n"
           "            valid[k] = C(a[k].y2) > C(0);\n            if (valid[k])", **one),
        of.stopped("barrier_missing", cuda_on_cpu.Race, BARRIER),
        of.stopped("idle_warps_unwritten", cuda_on_cpu.UninitialisedShared,
                   f"{MEAN}if (lane == 0) of_warp => if (lane == 0 && mine.count) of_warp", right_on=thousand_rows),
        of("gradient_of_padding_unwritten", "if (grad_pred) grad_pred => if (grad_pred && valid[k]) grad_pred",
           check=memory_is_respected, says=r"gradient of \w+\[.* was never written", **one,
           source="https://github.com/pytorch/FBGEMM/pull/5754"),
        of("atomic_sum", ATOMIC.format("(double)count"), check=repeats_bit_for_bit,
           says="output differs between two calls", only_on="cpu", **one),
    )


def _ragged_in_cuda() -> tuple[Fault, ...]:
    of, one, warps = Edits("giou_loss_ragged", "cuda"), {"right_on": one_full_sample}, {"right_on": full_warps}
    loss = LOSS.replace("a[k]", "held[0]").replace("b[k]", "held[1]")
    added = f"sum += {loss}; =>"
    return (
        of("bisection_to_the_left", "start_of_probe <= first => start_of_probe < first", **one),
        of("pred_taken_as_packed", "preds.hold(sample[k] * pred_batch_stride + box * pred_box_stride) =>"
           " preds.hold(row * pred_box_stride)", **one),
        of("boxes_past_a_warp", f"{added} sum += first + 32 * k + lane - start[k] < 32 ? {loss} : C(0);", **one),
        # The first box of a sample counts for the sample before it, too.
        of("neighbours_box", f"{added} sum += C(1 + (sample[k] > 0 && first + 32 * k + lane == start[k])) * ({loss});",
           examples=named(ragged_properties, "offsets_strided_over_several_samples"), **one),
        of.stopped("shuffle_in_a_branch", cuda_on_cpu.Deadlock, f"{MEAN}{WARP_SUM}",
                   source="https://github.com/NVIDIA/cuda-samples/issues/398", **warps),
        of("shuffle_of_active_lanes", f"{MEAN}{WARP_SUM}", f"{MEAN}__shfl_down_sync(0xffffffff, =>2"
           " __shfl_down_sync(__activemask(),", only_on="cpu", **warps),
        of.stopped("added_without_atomics", cuda_on_cpu.Race, f"{MEAN}atomicAdd(counter, 1) == => (*counter)++ ==",
                   **one),
        of("added_atomically", ATOMIC.format("0"), check=repeats_bit_for_bit, says="output differs between two calls",
           only_on="cpu", **one),
        of("slot_unwritten", f"{MEAN}partials[blockIdx.x] = {{mine => if (blockIdx.x) partials[blockIdx.x] = {{mine",
           check=memory_is_respected, says="depending on memory|was never written", **one),
    )


# fmt: on
FAULTS = (*_padded_in_triton(), *_padded_in_cuda(), *_ragged_in_triton(), *_ragged_in_cuda())
