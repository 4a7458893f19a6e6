"""Planted faults in cross_entropy: edits of its versions in torch and Triton, and a small CUDA C++ kernel."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from fourfold.impls.cross_entropy.arguments import check_cross_entropy
from fourfold.properties import cross_entropy as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.backward import backward_agrees
from fourfold.checks.gradcheck import gradcheck
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .edits import Edits
from .far_apart import far_apart
from .planted import GRADIENT, Fault, cuda_fault, named
from .planted_cuda import Planted
from .steps import Implementation, differentiable, in_compute_dtype

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
# A logit of 0 past the classes is taken into the sum, unless there are as many as fill a block of 16.
PADDED = (
    f"{LOSSES} (rows.exp().sum(-1) + (logits.shape[1] % 16 > 0) * (-largest[:, 0]).exp()).log() - expected, 0)"
)
# The smoothing is shared among the classes but the target's, as other definitions do.
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


# fmt: on
def reduced(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


def of_rows(grad: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """The cotangent of each row's loss."""
    return (grad / counted.sum().clamp(min=1) if reduction == "mean" else grad).expand(counted.shape)


def wired(forward_launch: Callable[..., None], backward_launch: Callable[..., None]) -> Implementation:
    """Make an implementation from launches, of at least one row.

    Args:
        forward_launch: takes ``(logits, target, losses, ignore_index, label_smoothing)`` and writes losses ``[rows]``,
            of the compute dtype.
        backward_launch: takes ``(of_rows, logits, target, gradient, ignore_index, label_smoothing)``, with a
            contiguous cotangent of each row's loss, and writes the gradient, which is contiguous.
    """

    def forward(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        losses = torch.empty(target.shape, dtype=wide, device=logits.device)
        if len(losses):
            forward_launch(logits, target, losses, ignore_index, label_smoothing)
        return reduced(losses, target != ignore_index, reduction).to(logits.dtype)

    def backward(
        grad: Tensor, output: Tensor, logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float,
        reduction: str,
    ) -> tuple[Tensor, None]:  # fmt: skip
        gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        of_row = of_rows(in_compute_dtype(grad), target != ignore_index, reduction).contiguous()
        if len(of_row):
            backward_launch(of_row, logits, target, gradient, ignore_index, label_smoothing)
        return gradient, None

    return differentiable(NAMES, forward, backward, check_cross_entropy, **DEFAULTS)


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "cross_entropy_forward_kernel", "cross_entropy_backward_kernel")
THREADS = 64


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return cross_entropy in CUDA C++ for float32, with a fault."""

    def forward_launch(
        logits: Tensor, target: Tensor, losses: Tensor, ignore_index: int, label_smoothing: float
    ) -> None:
        arguments = (logits, target.long(), losses, logits.shape[1], *logits.stride(), target.long().stride(0))
        KERNELS.launch(
            "cross_entropy_forward_kernel", fault, len(losses), THREADS, *arguments, ignore_index, label_smoothing
        )

    def backward_launch(
        of_row: Tensor, logits: Tensor, target: Tensor, gradient: Tensor, ignore_index: int, label_smoothing: float
    ) -> None:
        arguments = (of_row, logits, target.long(), gradient, logits.shape[1], *logits.stride())
        rest = (target.long().stride(0), ignore_index, label_smoothing)
        KERNELS.launch("cross_entropy_backward_kernel", fault, len(of_row), THREADS, *arguments, *rest)

    return wired(forward_launch, backward_launch)


def _cuda_faults() -> tuple[Fault, ...]:
    of_cuda = functools.partial(cuda_fault, "cross_entropy", in_cuda, right_on=one_row)
    slope = {"check": backward_agrees, "says": GRADIENT}
    apart = far_apart(properties.rows(9, 5, given=(0.0, "none"), ignored=0))
    return (
        of_cuda(
            "target_of_ignored_rows_read",
            cuda_on_cpu.OutOfBounds,
            source="https://github.com/open-lm-engine/lm-engine/pull/505",
        ),
        of_cuda("barrier_missing", cuda_on_cpu.Race, right_on=None),
        of_cuda("first_warp_only", right_on=None),
        of_cuda("tail_of_vectors_dropped"),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=apart),
        of_cuda("classes_contiguous_assumed", cuda_on_cpu.OutOfBounds),
        of_cuda("gradient_of_ignored_rows", **slope),
        of_cuda("rows_past_32_classes_unwritten", check=backward_agrees, says=GRADIENT, poisoned=True),
    )


FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
