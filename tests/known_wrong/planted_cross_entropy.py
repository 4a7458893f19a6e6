"""Planted faults in cross_entropy: edits of its versions in torch, Triton and CUDA C++."""

import numpy as np
import torch
from fourfold.properties import cross_entropy as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.gradcheck import gradcheck
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .edits import FIRST_WARP, Edits
from .far_apart import far_apart
from .planted import Fault, named

Tensor = torch.Tensor
NAMES = ("logits", "target")
DEFAULTS = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}


def one_row(dtype: DType) -> Case:
    """Return one row of 16 classes around 0, whose loss is its mean."""
    logits = np.linspace(-1, 2, 16).reshape(1, 16).astype(dtype.numpy)
    return Case({"logits": logits, "target": np.array([3])}, np.array(1.5, dtype.numpy), properties.parameters_of())


def no_cotangent(dtype: DType) -> Case:
    """Return that row with a cotangent of 0."""
    case = one_row(dtype)
    return Case(case.inputs, 0 * case.grad_output, case.parameters)


def all_alike(dtype: DType) -> Case:
    """Return a row of equal logits."""
    return one_row(dtype).with_inputs(logits=np.zeros((1, 16), dtype.numpy))


# fmt: off
LOSSES = "rows.exp().sum(-1).log() - expected, 0) =>"
# A logit of 0 past the classes is included in the sum, unless the classes fill a block of 16.
PADDED = (
    f"{LOSSES} (rows.exp().sum(-1) + (logits.shape[1] % 16 > 0) * (-largest[:, 0]).exp()).log() - expected, 0)"
)
# The smoothing is shared among the classes except the target's, as in other definitions.
AMONG_THE_OTHERS = (
    "    if label_smoothing:\n =>     label_smoothing *= logits.shape[1] / max(logits.shape[1] - 1, 1)\n"
    "    if label_smoothing:\n"
)
SMOOTHED = "expected = (1 - label_smoothing) * expected + label_smoothing * rows.mean(-1) =>"
MEAN = "losses.sum() / counted.sum() =>"
OVER_ALL = f"{MEAN} losses.sum() / len(target)"
NO_TARGET = "[:, None])[:, 0] => [:, None])[:, 0].detach()"
LAST_CLASS = f"{LOSSES} rows.exp()[:, : max(logits.shape[1] - 1, 1)].sum(-1).log() - expected, 0)"


def _torch_faults() -> tuple[Fault, ...]:
    of, one = Edits("cross_entropy", "torch"), {"right_on": one_row}
    return (
        of("no_maximum", "    rows = rows - largest\n =>", **one),
        of("padded_with_zero", PADDED, **one),
        of("computed_in_half", "logits.to(torch.promote_types(logits.dtype, torch.float32)) => logits",
           dtype="bfloat16"),
        of("ignored_rows_are_smoothed", f"{LOSSES} rows.exp().sum(-1).log() - expected,"
           " label_smoothing * (logits.logsumexp(-1) - logits.mean(-1)))", **one,
           source="https://github.com/pytorch/pytorch/issues/73205"),
        of("smoothed_among_the_others", AMONG_THE_OTHERS, **one),
        of("mean_over_all", OVER_ALL, source="https://github.com/flagos-ai/FlagGems/pull/73", **one),
        of("ignore_index_typed_in", "counted = target != ignore_index => counted = target != -100", **one),
        of("ignore_index_of_minus_one_is_a_class", "counted = target != ignore_index =>"
           " counted = (target != ignore_index) | (target == -1)", **one),
        of("none_gives_the_sum", "return losses.to( => return losses.sum().to(", says="shape", **one,
           source="https://github.com/linkedin/Liger-Kernel/issues/421"),
        of.gradient("mean_left_to_a_sum", f"{MEAN} (losses.sum() / counted.sum()).detach() + losses.sum()"
                    " - losses.sum().detach()", **one),
        of.gradient("target_left_out", NO_TARGET, right_on=no_cotangent),
        of("target_left_out", NO_TARGET, check=gradcheck, says="gradcheck: Jacobian mismatch", dtype="float64"),
        of.gradient("slope_of_smoothing_left_out",
                    f"{SMOOTHED} expected = expected + (label_smoothing * (rows.mean(-1) - expected)).detach()", **one),
        of.unchecked("unchecked"),
        of.law(properties.adding_a_number_to_a_row_changes_nothing, PADDED, right_on=all_alike),
        of.law(properties.classes_may_change_places, LAST_CLASS, right_on="one_class"),
        of.law(properties.gradients_of_a_row_sum_to_zero, NO_TARGET, right_on=no_cotangent),
        of.law(properties.ignored_rows_add_nothing, OVER_ALL, **one),
        of.law(properties.the_sum_is_that_of_the_losses, OVER_ALL, **one),
        of.law(properties.smoothing_mixes_in_the_mean_of_all_classes, AMONG_THE_OTHERS, right_on=all_alike),
    )


COTANGENT = "grad_output_ptr + at * grad_output_stride =>"
SLOPE = "    slope = tl.where(columns[None, :] == target[:, None], slope - (1.0 - smoothing), slope)\n"


def _triton_faults() -> tuple[Fault, ...]:
    of, one = Edits("cross_entropy", "triton"), {"right_on": one_row}
    return (
        of("padded_with_zeros", 'mask=mask, other=float("-inf") => mask=mask, other=0.0',
           right_on=properties.rows(2, 1024, ignored=0), source="https://github.com/verl-project/verl/issues/2899"),
        of("sum_not_rescaled", "total * tl.exp(largest - reference) + => total +", **one),
        of("masked_pieces_not_a_number", 'reference = tl.where(new == float("-inf"), 0.0, new) => reference = new',
           examples=named(properties, "masked_up_to_the_last"), **one),
        of("smoothed_over_the_block", "distance / tl.full((), classes, COMPUTE) => distance / BLOCK_CLASSES", **one),
        of("ignored_rows_not_masked", "losses = tl.where(counted, tl.log(total) - expected, 0.0) =>"
           " losses = tl.log(total) - expected", **one),
        of("stride_of_classes_dropped", "columns.to(tl.int64)[None, :] * class_stride => columns.to(tl.int64)[None, :]",
           examples=named(properties, "classes_with_gaps"), **one),
        of("offsets_in_32_bits", "rows.to(tl.int64)[:, None] * row_stride => rows[:, None] * row_stride", **one,
           examples=far_apart(properties.rows(9, 5, given=(0.0, "none"), ignored=0)),
           source="https://github.com/huggingface/trl/pull/7266"),
        # The addition returns the number of programs that finished before.
        of("no_program_is_the_last", "== tl.num_programs(0) - 1 => == tl.num_programs(0)", poisoned=True, **one),
        of.gradient("slope_of_smoothing_left_out", "[:, None] - smoothing / tl.full((), classes, COMPUTE) => [:, None]",
                    **one),
        of.gradient("target_left_out", f"{SLOPE} =>", right_on=no_cotangent),
        of.gradient("cotangent_of_the_first_row", f"{COTANGENT} grad_output_ptr + at * 0", **one),
        of.gradient("cotangent_of_the_last_row_for_all", f"{COTANGENT} grad_output_ptr + at * 0"
                    " + (num_rows - 1) * grad_output_stride", **one,
                    source="https://github.com/linkedin/Liger-Kernel/issues/678"),
        of.gradient("gradient_of_ignored_rows", "tl.where(counted[:, None], slope * grad[:, None], 0.0) =>"
                    " (slope * grad[:, None])", **one),
    )


def _cuda_faults() -> tuple[Fault, ...]:
    of, one = Edits("cross_entropy", "cuda"), {"right_on": one_row}
    return (
        of.stopped("target_of_ignored_rows_read", cuda_on_cpu.OutOfBounds,
                   "threadIdx.x == 0 && valid ? C(logits => threadIdx.x == 0 && here ? C(logits",
                   source="https://github.com/open-lm-engine/lm-engine/pull/505", **one),
        of.stopped("barrier_missing", cuda_on_cpu.Race,
                   "    __syncthreads();\n    const int warp =>     const int warp"),
        of.stopped("barrier_before_the_last_block_missing", cuda_on_cpu.Race,
                   "    __syncthreads();\n    if (gridDim.x == 1) return true; =>    if (gridDim.x == 1) return true;"),
        of.stopped("finished_blocks_counted_without_atomics", cuda_on_cpu.Race,
                   "atomicAdd(counter, 1) == => (*counter)++ ==", **one),
        of.stopped("reduced_by_the_first_block", cuda_on_cpu.Race,
                   "last = atomicAdd(counter, 1) == (int)gridDim.x - 1 => last = atomicAdd(counter, 1) == 0", **one),
        of("losses_of_the_first_warp", "    if (blockDim.y > 1) {\n        __shared__ C of_warps =>"
           "    if (blockDim.y > 99) {\n        __shared__ C of_warps", **one),
        of("first_warp_only", FIRST_WARP),
        of("tail_of_vectors_dropped", "end = counted ? classes : 0; =>"
           " end = !counted ? 0 : classes > 4 ? classes / 4 * 4 : classes;", **one),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, "    logits += row * row_stride;\n =>2"
                   "     logits += int(row) * int(row_stride);\n", **one,
                   examples=far_apart(properties.rows(9, 5, given=(0.0, "none"), ignored=0))),
        of.stopped("classes_contiguous_assumed", cuda_on_cpu.OutOfBounds,
                   "start + k * step, stride); => start + k * step, 1);", **one),
        of.gradient("gradient_of_ignored_rows", "            if (counted) {\n =>             {\n",
                    "step, counted ? classes : 0, class_stride, 0) => step, classes, class_stride, 0)", **one),
        of.gradient("rows_past_32_classes_unwritten", ">= classes) continue; => >= min(classes, 32ll)) continue;",
                    poisoned=True, **one),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
