"""Planted faults in cross_entropy: in torch, and in small Triton and CUDA C++ kernels."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from fourfold.impls.cross_entropy.arguments import check_cross_entropy
from fourfold.properties import cross_entropy as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.forward import forward_agrees
from fourfold.checks.gradcheck import gradcheck
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .far_apart import far_apart
from .planted import GRADIENT, OUTPUT, Fault, kernel_faults, law
from .planted_cuda import Planted
from .steps import Implementation, differentiable, in_compute_dtype

Tensor = torch.Tensor
NAMES = ("logits", "target")
DEFAULTS = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}


def row_losses(rows: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """The losses of rows that count."""
    rows = rows - rows.amax(-1, keepdim=True)
    expected = rows.gather(1, target[:, None])[:, 0]
    if smoothing:
        expected = (1 - smoothing) * expected + smoothing * rows.mean(-1)
    return rows.exp().sum(-1).log() - expected


def row_slopes(rows: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Their derivatives."""
    slopes = rows.softmax(-1) - smoothing / rows.shape[1]
    slopes[torch.arange(len(rows)), target] -= 1 - smoothing
    return slopes


def reduced(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


def of_rows(grad: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """The cotangent of each row's loss."""
    return (grad / counted.sum().clamp(min=1) if reduction == "mean" else grad).expand(counted.shape)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of cross_entropy that a fault may replace."""

    compute: Callable = in_compute_dtype
    counted: Callable = lambda target, ignore_index: target != ignore_index
    losses: Callable = row_losses
    # What rows that are ignored lose.
    ignored: Callable = lambda rows, smoothing: 0.0
    reduced: Callable = reduced
    # Steps of the gradient.
    slopes: Callable = row_slopes
    of_rows: Callable = of_rows


def cross_entropy(validate: Callable[..., None] = check_cross_entropy, **changes: Any) -> Implementation:
    """Return cross_entropy with some steps changed."""
    steps = Steps(**changes)

    def forward(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str) -> Tensor:
        counted, wide = steps.counted(target, ignore_index), steps.compute(logits)
        losses = torch.zeros(target.shape, dtype=wide.dtype, device=wide.device)
        losses[~counted] = steps.ignored(wide[~counted], label_smoothing)
        losses[counted] = steps.losses(wide[counted], target[counted].long(), label_smoothing)
        return steps.reduced(losses, counted, reduction).to(logits.dtype)

    def backward(
        grad: Tensor, output: Tensor, logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float,
        reduction: str,
    ) -> tuple[Tensor, None]:  # fmt: skip
        counted, wide = target != ignore_index, in_compute_dtype(logits)
        gradient = torch.zeros_like(wide, memory_format=torch.contiguous_format)
        slopes = steps.slopes(wide[counted], target[counted].long(), label_smoothing)
        of_row = steps.of_rows(in_compute_dtype(grad), counted, reduction)
        gradient[counted] = slopes * of_row[counted][:, None]
        return gradient.to(logits.dtype), None

    return differentiable(NAMES, forward, backward, validate, **DEFAULTS)


def without_maximum(rows: Tensor, target: Tensor, smoothing: float) -> Tensor:
    expected = (1 - smoothing) * rows.gather(1, target[:, None])[:, 0]
    return rows.exp().sum(-1).log() - expected - (smoothing * rows.mean(-1) if smoothing else 0)


def padded_with_zero(rows: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Take a logit of 0 past the classes into the sum, unless there are as many as fill a block of 16."""
    wide = rows if rows.shape[1] % 16 == 0 else torch.nn.functional.pad(rows, (0, 1))
    largest = wide.amax(-1)
    return row_losses(rows, target, smoothing) + (wide.logsumexp(-1) - largest) - (rows.logsumexp(-1) - largest)


def last_class_left_out(rows: Tensor, target: Tensor, smoothing: float) -> Tensor:
    lost = rows[:, :-1].logsumexp(-1) - rows.logsumexp(-1) if rows.shape[1] > 1 else 0
    return row_losses(rows, target, smoothing) + lost


def smoothed_among_the_others(rows: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Share the smoothing among the classes but the target's, as other definitions do."""
    others = rows.shape[1] - 1
    return row_losses(rows, target, smoothing * rows.shape[1] / others if others else smoothing)


def smoothed_loss_of_ignored(rows: Tensor, smoothing: float) -> Tensor:
    return smoothing * (rows.logsumexp(-1) - rows.mean(-1)) if smoothing else rows.new_zeros(len(rows))


def target_left_out(rows: Tensor, target: Tensor, smoothing: float) -> Tensor:
    return rows.softmax(-1) - smoothing / rows.shape[1]


def smoothing_left_out(rows: Tensor, target: Tensor, smoothing: float) -> Tensor:
    return row_slopes(rows, target, 0.0)


def mean_over_all(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    return losses.sum() / len(losses) if reduction == "mean" else reduced(losses, counted, reduction)


def wired(forward_launch: Callable[..., None], backward_launch: Callable[..., None], **changes: Any) -> Implementation:
    """Make an implementation from launches, of at least one row.

    Args:
        forward_launch: takes ``(logits, target, losses, ignore_index, label_smoothing)`` and writes losses ``[rows]``,
            of the compute dtype.
        backward_launch: takes ``(of_rows, logits, target, gradient, ignore_index, label_smoothing)``, with a
            contiguous cotangent of each row's loss, and writes the gradient, which is contiguous.
        changes: of `Steps`.
    """
    steps = Steps(**changes)

    def forward(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        losses = torch.empty(target.shape, dtype=wide, device=logits.device)
        if len(losses):
            forward_launch(logits, target, losses, ignore_index, label_smoothing)
        return steps.reduced(losses, target != ignore_index, reduction).to(logits.dtype)

    def backward(
        grad: Tensor, output: Tensor, logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float,
        reduction: str,
    ) -> tuple[Tensor, None]:  # fmt: skip
        gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        of_row = steps.of_rows(in_compute_dtype(grad), target != ignore_index, reduction).contiguous()
        if len(of_row):
            backward_launch(of_row, logits, target, gradient, ignore_index, label_smoothing)
        return gradient, None

    return differentiable(NAMES, forward, backward, check_cross_entropy, **DEFAULTS)


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr, target_ptr, losses_ptr, classes, row_stride, class_stride, target_stride, ignore_index, smoothing,
    FAULT: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program owns one row, which it reads BLOCK classes at a time.
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * target_stride).to(tl.int64)
    if FAULT == "offsets_in_32_bits":
        logits_ptr += tl.program_id(0) * row_stride
    else:
        logits_ptr += row * row_stride
    counted = target != ignore_index
    if FAULT == "ignored_rows_not_masked":
        counted = target == target
    largest = tl.full((), float("-inf"), COMPUTE)
    total = tl.zeros((), COMPUTE)
    sums = tl.zeros((), COMPUTE)
    padding: tl.constexpr = 0.0 if FAULT == "padded_with_zeros" else float("-inf")
    for start in range(0, classes, BLOCK):
        at = (start + tl.arange(0, BLOCK)).to(tl.int64)
        if FAULT == "stride_of_classes_dropped":
            x = tl.load(logits_ptr + at, mask=at < classes, other=padding).to(COMPUTE)
        else:
            x = tl.load(logits_ptr + at * class_stride, mask=at < classes, other=padding).to(COMPUTE)
        new = tl.maximum(largest, tl.max(x, axis=0))
        reference = new
        if FAULT != "masked_pieces_not_a_number":
            reference = tl.where(new == float("-inf"), 0.0, new)
        if FAULT != "sum_not_rescaled":
            total *= tl.exp(largest - reference)
        total += tl.sum(tl.exp(x - reference), axis=0)
        sums += tl.sum(tl.where(at < classes, x, 0.0), axis=0)
        largest = new
    at_target = tl.load(logits_ptr + target * class_stride, mask=counted & (target >= 0), other=0.0).to(COMPUTE)
    num = tl.full((), classes, COMPUTE)
    if FAULT == "smoothed_over_the_block":
        num = tl.full((), BLOCK, COMPUTE)
    loss = tl.log(total) + largest - at_target
    if smoothing > 0:
        loss += smoothing * (at_target - sums / num)
    tl.store(losses_ptr + row, tl.where(counted, loss, 0.0))


@triton.jit
def cross_entropy_backward_kernel(
    of_rows_ptr, logits_ptr, target_ptr, gradient_ptr, classes, row_stride, class_stride, target_stride, ignore_index,
    smoothing, FAULT: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program owns one row, which it holds as a whole.
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * target_stride).to(tl.int64)
    at = tl.arange(0, BLOCK).to(tl.int64)
    x = tl.load(logits_ptr + row * row_stride + at * class_stride, mask=at < classes, other=float("-inf")).to(COMPUTE)
    terms = tl.exp(x - tl.max(x, axis=0))
    slope = terms / tl.sum(terms, axis=0) - smoothing / classes
    if FAULT == "slope_of_smoothing_left_out":
        slope = terms / tl.sum(terms, axis=0)
    if FAULT != "target_left_out":
        slope = tl.where(at == target, slope - (1 - smoothing), slope)
    grad = tl.load(of_rows_ptr + row)
    if FAULT == "cotangent_of_the_first_row":
        grad = tl.load(of_rows_ptr)
    slope = tl.where(target == ignore_index, 0.0, slope * grad)
    if FAULT == "gradient_of_ignored_rows":
        slope = slope * 1.0 if target != ignore_index else terms * grad
    tl.store(gradient_ptr + row * classes + at, slope.to(gradient_ptr.dtype.element_ty), mask=at < classes)


def in_triton(fault: str = "", **changes: Any) -> Implementation:
    """Return cross_entropy in Triton for any dtype, with a fault."""

    def forward_launch(
        logits: Tensor, target: Tensor, losses: Tensor, ignore_index: int, label_smoothing: float
    ) -> None:
        with triton_launch.on(logits.device):
            cross_entropy_forward_kernel[(len(losses),)](
                logits, target, losses, logits.shape[1], *logits.stride(), target.stride(0), ignore_index,
                label_smoothing, FAULT=fault, COMPUTE=triton_launch.COMPUTE[logits.dtype], BLOCK=1024,
            )  # fmt: skip

    def backward_launch(
        of_row: Tensor, logits: Tensor, target: Tensor, gradient: Tensor, ignore_index: int, label_smoothing: float
    ) -> None:
        classes = logits.shape[1]
        with triton_launch.on(logits.device):
            cross_entropy_backward_kernel[(len(of_row),)](
                of_row, logits, target, gradient, classes, *logits.stride(), target.stride(0), ignore_index,
                label_smoothing, FAULT=fault, COMPUTE=triton_launch.COMPUTE[logits.dtype],
                BLOCK=triton.next_power_of_2(classes),
            )  # fmt: skip

    return wired(forward_launch, backward_launch, **changes)


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


def _of_torch() -> tuple[Fault, ...]:
    def of(
        name: str, check: Callable, says: str = OUTPUT, right_on: Any = one_row, dtype: str = "float32",
        source: Any = None, **changes: Any,
    ) -> Fault:  # fmt: skip
        make = functools.partial(cross_entropy, **changes)
        return Fault(
            name=name, operation="cross_entropy", check=check, make=make, says=says, right_on=right_on, dtype=dtype,
            source=source,
        )  # fmt: skip

    forward, backward, left = forward_agrees, backward_agrees, r"left side.* is .*expected"
    over_all = {"reduced": mean_over_all}
    no_target = {"slopes": target_left_out}
    return (
        of("no_maximum", forward, losses=without_maximum),
        of("padded_with_zero", forward, losses=padded_with_zero),
        of("computed_in_half", forward, dtype="bfloat16", right_on=None, compute=lambda x: x),
        of(
            "ignored_rows_are_smoothed",
            forward,
            ignored=smoothed_loss_of_ignored,
            source="https://github.com/pytorch/pytorch/issues/73205",
        ),
        of("smoothed_among_the_others", forward, losses=smoothed_among_the_others),
        of("mean_over_all", forward, source="https://github.com/flagos-ai/FlagGems/pull/73", **over_all),
        of(
            "ignore_index_typed_in",
            forward,
            counted=lambda target, ignore_index: target != -100,
        ),
        of(
            "none_gives_the_sum",
            forward,
            "shape",
            reduced=lambda losses, counted, reduction: reduced(losses, counted, reduction).sum(),
            source="https://github.com/linkedin/Liger-Kernel/issues/421",
        ),
        of(
            "cotangent_of_the_last_row_for_all",
            backward,
            GRADIENT,
            of_rows=lambda grad, counted, reduction: of_rows(
                grad[-1:] if reduction == "none" else grad, counted, reduction
            ),
            source="https://github.com/linkedin/Liger-Kernel/issues/678",
        ),
        of("mean_left_to_a_sum", backward, GRADIENT, of_rows=lambda grad, counted, _: of_rows(grad, counted, "sum")),
        of("target_left_out", backward, GRADIENT, no_cotangent, **no_target),
        of("target_left_out", gradcheck, "gradcheck: Jacobian mismatch", None, "float64", **no_target),
        of("slope_of_smoothing_left_out", backward, GRADIENT, slopes=smoothing_left_out),
        of("unchecked", declared_errors_are_raised, "in place of|was raised", None, validate=lambda *_, **__: None),
        of("law", law(properties.adding_a_number_to_a_row_changes_nothing), left, all_alike, losses=padded_with_zero),
        of("law", law(properties.classes_may_change_places), left, "one_class", losses=last_class_left_out),
        of("law", law(properties.gradients_of_a_row_sum_to_zero), left, no_cotangent, **no_target),
        of("law", law(properties.ignored_rows_add_nothing), left, **over_all),
        of("law", law(properties.the_sum_is_that_of_the_losses), left, **over_all),
        of(
            "law",
            law(properties.smoothing_mixes_in_the_mean_of_all_classes),
            left,
            all_alike,
            losses=smoothed_among_the_others,
        ),
    )


def _of_kernels() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("cross_entropy", in_triton, in_cuda, right_on=one_row)
    slope = {"check": backward_agrees, "says": GRADIENT}
    examples = properties.examples
    apart = far_apart(properties.rows(9, 5, given=(0.0, "none"), ignored=0))

    def named(name: str) -> dict[str, Any]:
        return {"examples": {name: examples[name]}}

    return (
        of_triton(
            "padded_with_zeros",
            right_on=properties.rows(2, 1024, ignored=0),
            source="https://github.com/verl-project/verl/issues/2899",
        ),
        of_triton("sum_not_rescaled"),
        of_triton("masked_pieces_not_a_number", **named("masked_up_to_the_last")),
        of_triton("smoothed_over_the_block"),
        of_triton("ignored_rows_not_masked"),
        of_triton("stride_of_classes_dropped", **named("classes_with_gaps")),
        of_triton("offsets_in_32_bits", examples=apart, source="https://github.com/huggingface/trl/pull/7266"),
        of_triton("slope_of_smoothing_left_out", **slope),
        of_triton("target_left_out", **slope, right_on=no_cotangent),
        of_triton("cotangent_of_the_first_row", **slope),
        of_triton("gradient_of_ignored_rows", **slope),
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


FAULTS = (*_of_torch(), *_of_kernels())
