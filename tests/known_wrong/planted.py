"""Planted faults: implementations with exactly one mistake, and the check that must reject each."""

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from fourfold.impls.giou.arguments import check_giou, check_giou_loss_ragged
from fourfold.impls.giou.torch_eager import pairwise_giou
from fourfold.properties import giou as giou_properties
from fourfold.properties import giou_loss as giou_loss_properties
from fourfold.properties import giou_loss_ragged
from fourfold.properties.boxes import box_pairs
from fourfold.properties.giou import example

from fourfold.backends.arguments import check_floating
from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.backward import backward_agrees
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.forward import forward_agrees
from fourfold.checks.gradcheck import gradcheck
from fourfold.checks.laws import law_holds
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.repeatability import repeats_bit_for_bit
from fourfold.checks.search import Search, Subject
from fourfold.checks.single_gradients import single_gradients_agree
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure
from fourfold.operations.record import Law, Operation

from . import planted_cuda
from .far_apart import pairs_far_apart
from .published import giou_without_clamp
from .steps import (
    Implementation,
    Steps,
    giou,
    loss,
    one_term_after_another,
    ragged_rows,
    score_gradients,
    wire,
)

Check = Callable[[Subject, Search], None]
CaseOf = Callable[[DType], Case]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault.

    Attributes:
        name: the mistake.
        operation: the operation that is implemented.
        make: makes the implementation.
        check: the check that must reject it.
        says: a regular expression for the failure's message.
        right_on: a case that the check accepts: the name of one of the operation's examples, or a function of the
            dtype. None if the mistake affects every case.
        language: the language of the mistake: "torch", "triton" or "cuda".
        source: a public report of this mistake in a kernel, or of this way to cheat.
        dtype: the dtype for which the check must reject it.
        raises: the expected exception.
        examples: named examples that replace the operation's own.
        search: the number of generated cases within which the check must find it; by default as many as a run has.
        poisoned: whether fresh allocations hold NaN.
        only_on: the device on which alone it shows: "cpu" if by the checked build or by the order of torch's sums.
        documented: whether it is right as a candidate, and wrong only for this library's own implementations,
            which document how they choose at ties.
        seen_by: what it takes to see it: "large" for large cases, such as those that constants of its source ask for;
            beside them "combined" for combined cases, "settled" for the bounds of results that are rounded once or
            summed exactly, "comparisons" for cases past what the code compares at run time. Empty if none.
        record: the operation's record, where it is declared and has no place among the known ones.
        output: of several outputs the one that the check looks at; "" for what all of them are together.
    """

    name: str
    operation: str
    make: Callable[[], Implementation]
    check: Check
    says: str
    right_on: str | CaseOf | None
    language: str = "torch"
    source: str | None = None
    dtype: str = "float32"
    raises: type[Exception] = Failure
    examples: Mapping[str, CaseOf] = field(default_factory=dict)
    search: int = 25
    poisoned: bool = False
    only_on: str = ""
    documented: bool = False
    seen_by: str = ""
    record: Operation | None = None
    output: str = ""


# Patterns of the messages for a wrong output, for a wrong gradient, and for a result with missing elements.
OUTPUT, GRADIENT = r"output\[.*is .*expected", r"gradient of \w+\[.*is .*expected"
UNWRITTEN = "was never written"


def cuda_fault(
    operation: str,
    in_cuda: Callable[..., Implementation],
    name: str,
    raises: type[Exception] | None = None,
    **fields: Any,
) -> Fault:
    """Return a fault of a CUDA C++ kernel, by default of the output. Its name in capitals selects the mistake.

    The checked build detects one that ``raises``, and names the line.
    """
    common = {"check": forward_agrees, "says": OUTPUT}
    if raises:
        common |= {"raises": raises, "says": r"\w\.cu:\d+\)", "only_on": "cpu"}
    make = functools.partial(in_cuda, name.upper())
    return Fault(**{"operation": operation, "name": name, "language": "cuda", "make": make, **common, **fields})


def kernel_faults(
    operation: str, in_triton: Callable[..., Implementation], in_cuda: Callable[..., Implementation], **common: Any
) -> tuple[Callable[..., Fault], Callable[..., Fault]]:
    """Return two functions that make an operation's faults by name, one in Triton and one in CUDA C++."""
    common = {"check": forward_agrees, "says": OUTPUT, **common}

    def of_triton(name: str, **more: Any) -> Fault:
        make = functools.partial(in_triton, name)
        return Fault(**{"operation": operation, "name": name, "language": "triton", "make": make, **common, **more})

    def of_cuda(name: str, raises: type[Exception] | None = None, **more: Any) -> Fault:
        given = {key: value for key, value in common.items() if not raises or key != "says"}
        return cuda_fault(operation, in_cuda, name, raises, **{**given, **more})

    return of_triton, of_cuda


A_PAIR = [0.0, 0.0, 4.0, 3.0], [1.0, 1.0, 6.0, 5.0]


def one_pair(dtype: DType) -> Case:
    """Return one pair of boxes that overlap, without ties."""
    return example([A_PAIR[0]], [A_PAIR[1]])(dtype)


def sixty_four_pairs(dtype: DType) -> Case:
    """Return as many pairs as a block of the Triton and CUDA kernels has."""
    boxes1, boxes2 = box_pairs(np.random.default_rng(1), 64, ("overlapping", "nested"), dtype)
    return Case({"boxes1": boxes1, "boxes2": boxes2}, np.linspace(-2, 1, 64).astype(dtype.numpy), {"eps": 1e-5})


def cotangent_of_ones(dtype: DType) -> Case:
    """Return a case with the grad_output of ``giou(...).sum().backward()``, but contiguous."""
    case = sixty_four_pairs(dtype)
    return Case(case.inputs, np.ones(64, dtype=dtype.numpy), case.parameters)


def one_row(dtype: DType) -> Case:
    """Return one valid row."""
    return giou_loss_properties.example([[A_PAIR[0]]], [[A_PAIR[1]]])(dtype)


def thousand_rows(dtype: DType) -> Case:
    """Return one sample of 1024 valid rows, as many as a block of the CUDA kernel has threads."""
    boxes = np.tile(np.array(A_PAIR, dtype=dtype.numpy)[:, None, None], (1, 1, 1024, 1))
    return Case({"pred": boxes[0], "target": boxes[1]}, np.array(-1.5, dtype=dtype.numpy), {"eps": 1e-5})


def ragged_row(dtype: DType) -> Case:
    """Return one box in a sample with room for two."""
    pred, target = (np.array([[box, box]], dtype=dtype.numpy) for box in A_PAIR)
    return Case(giou_loss_ragged.ragged(pred, target, np.array([1])), np.array(2, dtype=dtype.numpy), {"eps": 1e-5})


def named(operation: ModuleType, *examples: str) -> dict[str, CaseOf]:
    """Return some named examples of an operation's module, of its first output if there are several."""
    record = operation.operation
    record = next(iter(record.outputs.values()), record)
    return {example: record.examples[example] for example in examples}


def law(which: Law) -> Check:
    """Return the check of one law."""
    return functools.partial(law_holds, which)


def score_backward(grad_output: torch.Tensor, boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> tuple:
    """Return the right gradients of giou in the boxes' dtype, for faults of only the output."""
    return score_gradients(Steps(), grad_output, boxes1, boxes2, eps)


# ---- giou, forward


def rows_shifted() -> Implementation:
    """From row 64 on, pair each box with its neighbour's partner."""
    right = giou()

    def forward(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
        rows = boxes2.reshape(-1, 4)
        rows = torch.cat([rows[:64], rows[64:].roll(1, 0)])
        return right(boxes1=boxes1, boxes2=rows.view(boxes2.shape), eps=eps)

    return wire("giou", forward)


def last_row_dropped() -> Implementation:
    """Drop the last row if the number of rows is odd, as a loop over pairs of rows does."""
    right = giou()

    def forward(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
        output = right(boxes1=boxes1, boxes2=boxes2, eps=eps)
        if output.numel() % 2:
            output.view(-1)[-1] = 0
        return output

    return wire("giou", forward)


def converted_in_place() -> Implementation:
    """Convert the caller's corners to sizes and back in place: x1 + (x2 - x1) is not always x2."""
    right = giou()

    def forward(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
        output = right(boxes1=boxes1, boxes2=boxes2, eps=eps)
        if 0 not in boxes1.stride():
            boxes1[..., 2:] -= boxes1[..., :2]
            boxes1[..., 2:] += boxes1[..., :2]
        return output

    return wire("giou", forward, score_backward)


def remembered_by_shape() -> Implementation:
    """Return the first result for a shape again, as a captured graph does if its inputs are not copied in."""
    right = giou()
    seen: dict[Any, torch.Tensor] = {}

    def forward(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
        key = boxes1.shape, eps
        if key not in seen:
            seen[key] = right(boxes1=boxes1, boxes2=boxes2, eps=eps)
        return seen[key].clone()

    return wire("giou", forward)


def output_handed_out_again() -> Implementation:
    """Write every result of one shape into the same buffer."""
    right = giou()
    buffers: dict[Any, torch.Tensor] = {}

    def forward(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
        output = right(boxes1=boxes1, boxes2=boxes2, eps=eps)
        return buffers.setdefault(output.shape, output).copy_(output)

    return wire("giou", forward, score_backward)


def output_in_place_of_x1() -> Implementation:
    """Return a view of an input, as a kernel that works in place does."""

    def forward(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
        return boxes1.detach()[..., 0]

    return wire("giou", forward, score_backward)


# ---- giou, backward


def against_the_slope_along_x1(grad_a: torch.Tensor, grad_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    signs = torch.tensor([-1, 1, 1, 1], dtype=grad_a.dtype, device=grad_a.device)
    return grad_a * signs, grad_b * signs


def all_zero(grad_a: torch.Tensor, grad_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(grad_a), torch.zeros_like(grad_b)


def second_is_a_constant(grad_a: torch.Tensor, grad_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return grad_a, torch.zeros_like(grad_b)


def always_passes(operand: torch.Tensor, bound: float) -> torch.Tensor:
    return torch.ones_like(operand, dtype=torch.bool)


def passes_above(operand: torch.Tensor, bound: float) -> torch.Tensor:
    return operand > bound


def read_as_contiguous(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Read `count` contiguous elements from a tensor's first one on, whatever its strides; 0 past its storage."""
    flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    flat = flat[tensor.storage_offset() :][:count]
    return torch.cat([flat, flat.new_zeros(count - len(flat))])


def cotangent_read_as_contiguous(grad_output: torch.Tensor) -> torch.Tensor:
    return read_as_contiguous(grad_output, grad_output.numel()).view(grad_output.shape)


def half_for_the_second_alone() -> Implementation:
    """Finish a value that both gradients need only in the branch of the first."""

    class Wired(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
            ctx.save_for_backward(boxes1, boxes2)
            ctx.eps = eps
            return pairwise_giou(boxes1, boxes2, eps)

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            needs1, needs2, _ = ctx.needs_input_grad
            finish = 1.0 if needs1 else 0.5
            grad1, grad2 = score_gradients(Steps(), grad_output * finish, *ctx.saved_tensors, ctx.eps)
            return grad1 if needs1 else None, grad2 if needs2 else None, None

    def implementation(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
        return Wired.apply(boxes1, boxes2, eps)

    return implementation


GIOU_BACKWARD = (
    # If union and hull are below eps, every gradient is 0, whatever its sign or factor.
    ("x1_against_the_slope", {"gradients": against_the_slope_along_x1}, "identical_points"),
    ("gradient_of_zeros", {"gradients": all_zero}, "identical_points"),
    ("no_gradient_for_boxes2", {"gradients": second_is_a_constant}, "identical_points"),
    (
        "grad_output_ignored",
        {"cotangent": torch.ones_like},
        cotangent_of_ones,
        "https://github.com/pytorch/pytorch/issues/21961",
    ),
    # sum().backward() passes an expanded grad_output, with stride 0 and memory for one element.
    (
        "grad_output_read_as_contiguous",
        {"cotangent": cotangent_read_as_contiguous},
        one_pair,
        "https://github.com/Dao-AILab/flash-attention/issues/355",
    ),
    ("side_passes_below_its_clamp", {"side_passes": always_passes}, one_pair),
    ("area_passes_below_its_clamp", {"area_passes": always_passes}, one_pair),
)
# Shares of the gradient at ties, and gradients that stop at a clamp's limit.
AT_TIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("whole_gradient_at_ties", {"tie": 1.0}),
    ("no_gradient_at_ties", {"tie": 0.0}),
    ("side_stops_at_its_clamp", {"side_passes": passes_above}),
    ("area_stops_at_its_clamp", {"area_passes": passes_above}),
)


# ---- giou_loss


def summed_in_any_order() -> Callable[[torch.Tensor], torch.Tensor]:
    """Sum in the order in which blocks finish, as atomics do: within every bound, but never twice the same."""
    order = torch.Generator().manual_seed(0)

    def total(losses: torch.Tensor) -> torch.Tensor:
        return one_term_after_another(losses[torch.randperm(len(losses), generator=order).to(losses.device)])

    return total


# ---- giou_loss_ragged


def rows_by(pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor) -> tuple[tuple, tuple]:
    """Return rows by arbitrary offsets, clamped to pred."""
    (sample, place), row = ragged_rows(pred, target, offsets.clamp(0, len(target)))
    return (sample.clamp(0, len(pred) - 1), place.clamp(0, max(pred.shape[1] - 1, 0))), row


def offsets_taken_for_int64(pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor) -> tuple[tuple, tuple]:
    words = offsets.contiguous().view(torch.int32)
    return rows_by(pred, target, read_as_contiguous(words, 2 * len(offsets)).view(torch.int64))


def offsets_read_as_contiguous(pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor) -> tuple[tuple, tuple]:
    return rows_by(pred, target, read_as_contiguous(offsets, len(offsets)))


OFFSETS_MISREAD = (
    ("offsets_taken_for_int64", {"rows": offsets_taken_for_int64}, ragged_row),
    ("offsets_read_as_contiguous", {"rows": offsets_read_as_contiguous}, ragged_row),
)


# ---- errors


def broadcasting_accepted(boxes1: Any, boxes2: Any, eps: float) -> None:
    with contextlib.suppress(RuntimeError, AttributeError):  # the check must report the mistake itself
        if boxes2.shape[-1:] == (4,):
            boxes2 = boxes2.expand(boxes1.shape)
    check_giou(boxes1, boxes2, eps)


def errors_of_another_type(boxes1: Any, boxes2: Any, eps: float) -> None:
    try:
        check_giou(boxes1, boxes2, eps)
    except ValueError as error:
        raise RuntimeError(str(error)) from error


def errors_without_names(boxes1: Any, boxes2: Any, eps: float) -> None:
    try:
        check_giou(boxes1, boxes2, eps)
    except (TypeError, ValueError) as error:
        raise type(error)("the arguments of the call do not fit each other") from error


def eps_compared_once(boxes1: Any, boxes2: Any, eps: float) -> None:
    check_giou(boxes1, boxes2, 1.0)
    if eps <= 0:
        raise ValueError(f"eps must be positive, not {eps}")


def integers_converted(boxes1: Any, boxes2: Any, eps: float) -> None:
    if isinstance(boxes1, torch.Tensor) and not boxes1.is_floating_point():
        return
    check_floating("boxes1", boxes1)
    check_giou(boxes1, boxes2, eps)


def offset_values_taken_on_trust(pred: Any, target: Any, offsets: Any, eps: float) -> None:
    try:
        check_giou_loss_ragged(pred, target, offsets, eps)
    except ValueError as error:
        if not re.match("offsets (must run|must never|give)", str(error)):
            raise


GIOU_ERRORS = (
    ("broadcasting_accepted", broadcasting_accepted, "boxes2_of_shape_9_4: no ValueError naming boxes2"),
    ("errors_of_another_type", errors_of_another_type, "RuntimeError in place of ValueError"),
    ("errors_without_names", errors_without_names, "the message does not name boxes1"),
    ("eps_of_nan_accepted", eps_compared_once, "eps_not_a_number: no ValueError naming eps"),
    ("integer_boxes_accepted", integers_converted, "boxes1_of_int64: no TypeError naming boxes1"),
)


# ---- all of them


def _faults() -> list[Fault]:
    faults = []

    def add(
        name: str, operation: str, check: Check, make: Callable[[], Implementation], says: str, **more: Any
    ) -> None:
        faults.append(Fault(name=name, operation=operation, check=check, make=make, says=says, **more))

    output, gradient = OUTPUT, GRADIENT
    forward, backward, memory = forward_agrees, backward_agrees, memory_is_respected

    add("last_row_dropped", "giou", forward, last_row_dropped, output, right_on=sixty_four_pairs)
    add("rows_shifted", "giou", forward, rows_shifted, output, right_on=sixty_four_pairs)
    add("remembered_by_shape", "giou", forward, remembered_by_shape, output, right_on=one_pair)
    add("converted_in_place", "giou", forward, converted_in_place, "changed its input boxes1", right_on=one_pair)
    add(
        "converted_in_place", "giou", memory, converted_in_place, r"wrote \d+ elements inside its input boxes1",
        right_on=one_pair,
    )  # fmt: skip
    add(
        "output_handed_out_again", "giou", memory, output_handed_out_again,
        "output shares its memory with a former result", right_on=None,
    )  # fmt: skip
    add(
        "output_in_place_of_x1", "giou", memory, output_in_place_of_x1,
        "output shares its memory with its input boxes1", right_on=None,
    )  # fmt: skip
    add(
        "grad_output_read_as_contiguous", "giou", memory,
        functools.partial(giou, cotangent=cotangent_read_as_contiguous), "depending on memory that the call was not",
        right_on=one_pair,
    )  # fmt: skip
    for name, changes, right_on, *source in GIOU_BACKWARD:
        make = functools.partial(giou, **changes)
        add(name, "giou", backward, make, gradient, right_on=right_on, source=next(iter(source), None))
    for name, changes in AT_TIES:
        make = functools.partial(giou, **changes)
        add(name, "giou", backward, make, gradient, right_on=one_pair, documented=True)
    # Two equal edges may share the gradient in any way. But no subgradient gives all of it to both, or none to either.
    for name, changes in AT_TIES[:2]:
        which = giou_properties.gradients_along_an_axis_cancel
        make = functools.partial(giou, **changes)
        add(name, "giou", law(which), make, f"{which.__name__}: left side", right_on=one_pair)
    for name, changes, *_ in (GIOU_BACKWARD[0], GIOU_BACKWARD[1], GIOU_BACKWARD[3]):
        make = functools.partial(giou, **changes)
        add(name, "giou", gradcheck, make, "gradcheck: Jacobian mismatch", right_on=None, dtype="float64")
    add(
        "half_for_the_second_alone", "giou", single_gradients_agree, half_for_the_second_alone,
        "for boxes2 alone, gradient of boxes2", right_on="identical_points",
    )  # fmt: skip

    add(
        "gradient_of_padding_unwritten", "giou_loss", memory,
        functools.partial(loss, "giou_loss", blank=torch.empty_like), r"gradient of \w+\[.* was never written",
        right_on=one_row, source="https://github.com/pytorch/FBGEMM/pull/5754",
    )  # fmt: skip
    add(
        "summed_in_any_order", "giou_loss", repeats_bit_for_bit,
        lambda: loss("giou_loss", total=summed_in_any_order()), "output differs between two calls", right_on=one_row,
    )  # fmt: skip

    for name, changes, right_on in OFFSETS_MISREAD:
        make = functools.partial(loss, "giou_loss_ragged", **changes)
        add(name, "giou_loss_ragged", forward, make, output, right_on=right_on)
    for name, check, says in GIOU_ERRORS:
        add(name, "giou", declared_errors_are_raised, functools.partial(giou, check), says, right_on=None)
    add(
        "offset_values_taken_on_trust", "giou_loss_ragged", declared_errors_are_raised,
        functools.partial(loss, "giou_loss_ragged", offset_values_taken_on_trust, rows=rows_by),
        "no ValueError naming offsets|offsets_not_from_0: the output is .*, not NaN", right_on=None,
    )  # fmt: skip

    for which, make, right_on in (
        (
            giou_properties.swapping_the_boxes_changes_nothing,
            functools.partial(giou, gradients=second_is_a_constant),
            "identical_points",
        ),
        (giou_properties.never_above_intersection_over_union, lambda: giou_without_clamp, one_pair),
        (giou_properties.a_box_scores_one_with_itself, rows_shifted, one_pair),
    ):
        add("law", "giou", law(which), make, f"{which.__name__}: left side", right_on=right_on)

    # ---- CUDA C++: faults in memory accesses

    cuda: Any = functools.partial(add, language="cuda", only_on="cpu")
    cuda(
        "store_unmasked", "giou", forward, lambda: planted_cuda.giou("STORE_UNMASKED"),
        r"planted\.cu:\d+\).*write of 4 bytes, just past the end", right_on=sixty_four_pairs,
        raises=cuda_on_cpu.OutOfBounds,
    )  # fmt: skip
    # The arena's redzones lie past the tensor's end. The checked build stops a kernel before the arena sees the write.
    cuda(
        "store_unmasked", "giou", memory, lambda: planted_cuda.giou("STORE_UNMASKED"),
        r"planted\.cu:\d+\).*write of 4 bytes, just past the end", right_on=sixty_four_pairs,
        raises=cuda_on_cpu.OutOfBounds,
    )  # fmt: skip
    cuda(
        "load_unmasked", "giou", forward, lambda: planted_cuda.giou("LOAD_UNMASKED"),
        r"planted\.cu:\d+\).*read of 4 bytes", right_on=sixty_four_pairs, raises=cuda_on_cpu.OutOfBounds,
    )  # fmt: skip
    cuda(
        "offsets_in_32_bits", "giou", forward, lambda: planted_cuda.giou("OFFSETS_IN_32_BITS"),
        r"planted\.cu:\d+\).*overflow", right_on=sixty_four_pairs, raises=cuda_on_cpu.UndefinedArithmetic,
        examples={"rows_2_28_elements_apart": pairs_far_apart},
    )  # fmt: skip
    cuda(
        "contiguous_assumed", "giou", forward, lambda: planted_cuda.giou("CONTIGUOUS_ASSUMED"),
        r"planted\.cu:\d+\).*read of 4 bytes", right_on=one_pair, raises=cuda_on_cpu.OutOfBounds,
    )  # fmt: skip
    cuda(
        "grad_output_contiguous_assumed", "giou", backward,
        lambda: planted_cuda.giou("NONE", "CONTIGUOUS_ASSUMED"),
        r"planted\.cu:\d+\).*read of 4 bytes", right_on=one_pair, raises=cuda_on_cpu.OutOfBounds,
    )  # fmt: skip
    cuda(
        "nan_dropped", "giou", forward, lambda: planted_cuda.giou("NAN_DROPPED"), output, right_on=one_pair,
        only_on="",
    )  # fmt: skip
    cuda(
        "barrier_missing", "giou_loss", forward, lambda: planted_cuda.giou_loss("BARRIER_MISSING"),
        r"planted\.cu:\d+\).*", right_on=None, raises=cuda_on_cpu.Race,
    )  # fmt: skip
    cuda(
        "idle_warps_unwritten", "giou_loss", forward, lambda: planted_cuda.giou_loss("IDLE_WARPS_UNWRITTEN"),
        r"planted\.cu:\d+\).*", right_on=thousand_rows, raises=cuda_on_cpu.UninitialisedShared,
    )  # fmt: skip
    cuda(
        "atomic_sum", "giou_loss", repeats_bit_for_bit, lambda: planted_cuda.giou_loss("ATOMIC_SUM"),
        "output differs between two calls", right_on=one_row,
    )  # fmt: skip
    return faults


FAULTS = tuple(_faults())
