"""Planted faults: implementations with exactly one mistake, and the check that must reject each."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from fourfold.properties import giou_loss as giou_loss_properties
from fourfold.properties import giou_loss_ragged
from fourfold.properties.boxes import box_pairs
from fourfold.properties.giou import example

from fourfold.checks.forward import forward_agrees
from fourfold.checks.laws import law_holds
from fourfold.checks.search import Search, Subject
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure
from fourfold.operations.record import Law, Operation

Implementation = Callable[..., torch.Tensor]
Check = Callable[[Subject, Search], None]
CaseOf = Callable[[DType], Case]


# Patterns of the messages for a wrong output, for a wrong gradient, and for a result with missing elements.
OUTPUT, GRADIENT = r"output\[.*is .*expected", r"gradient of \w+\[.*is .*expected"
UNWRITTEN = "was never written"


@dataclass(frozen=True)
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
        raises: the expected exception, or a tuple of alternatives.
        examples: named examples that replace the operation's own.
        search: the number of generated cases within which the check must find it; by default as many as a run has.
        poisoned: whether fresh allocations hold NaN.
        only_on: the only device on which it shows: "cpu" for the checked build or the order of torch's sums.
        documented: whether it is right as a candidate, and wrong only for this library's own implementations,
            which document how they choose at ties.
        seen_by: the cases that expose it: "large" for large cases, such as those from constants of its source; beside
            them "combined" for combined cases, "settled" for the bounds of results that are rounded once or summed
            exactly, "comparisons" for cases past what the code compares at run time. Empty if none.
        record: the operation's record, if it is declared and not among the known ones.
        output: the output that the check compares, if there are several; "" for all together.
    """

    name: str
    operation: str
    make: Callable[[], Implementation]
    _: KW_ONLY
    check: Check = forward_agrees
    says: str = OUTPUT
    right_on: str | CaseOf | None = None
    language: str = "torch"
    source: str | None = None
    dtype: str = "float32"
    raises: type[Exception] | tuple[type[Exception], ...] = Failure
    examples: Mapping[str, CaseOf] = field(default_factory=dict)
    search: int = 25
    poisoned: bool = False
    only_on: str = ""
    documented: bool = False
    seen_by: str = ""
    record: Operation | None = None
    output: str = ""

    @classmethod
    def of(cls, operation: str | Operation, function: Implementation, **more: Any) -> "Fault":
        """Return the fault of a function, under the function's name.

        Args:
            operation: the name of the operation, or its record where it is declared.
            function: the implementation.
            more: other fields.
        """
        if isinstance(operation, Operation):
            more, operation = {"record": operation, **more}, operation.name
        return cls(more.pop("name", function.__name__), operation, lambda: function, **more)


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
    """Return one sample of 16384 valid rows, which keep all warps busy."""
    boxes = np.tile(np.array(A_PAIR, dtype=dtype.numpy)[:, None, None], (1, 1, 16384, 1))
    return Case({"pred": boxes[0], "target": boxes[1]}, np.array(-1.5, dtype=dtype.numpy), {"eps": 1e-5})


def ragged_row(dtype: DType) -> Case:
    """Return one box in a sample with room for two."""
    pred, target = (np.array([[box, box]], dtype=dtype.numpy) for box in A_PAIR)
    return Case(giou_loss_ragged.pack_boxes(pred, target, np.array([1])), np.array(2, dtype=dtype.numpy), {"eps": 1e-5})


def named(operation: ModuleType, *examples: str) -> dict[str, CaseOf]:
    """Return some named examples of an operation's module, for its first output if there are several."""
    record = operation.operation
    record = next(iter(record.outputs.values()), record)
    return {example: record.examples[example] for example in examples}


def law(which: Law) -> Check:
    """Return the check of one law."""
    return functools.partial(law_holds, which)
