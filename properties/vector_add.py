"""The record of vector_add: elementwise sum of two arrays of one shape."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from fourfold.oracles import vector_add as oracle

from fourfold.inputs.elementwise import Elementwise
from fourfold.numerics.dtypes import DType
from fourfold.operations.arguments import tensor
from fourfold.operations.case import Case
from fourfold.operations.declared_errors import Arguments
from fourfold.operations.record import Evaluate, Operation, Relation, Sized
from fourfold.operations.relations import equals_exactly

SUMMANDS = Elementwise(x="normal", y="spread")
random_case = SUMMANDS.random
examples: Mapping[str, Callable[[DType], Case]] = {**SUMMANDS.examples, "special_sums": SUMMANDS.special_numbers}


def the_order_of_the_terms_does_not_matter(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """x + y = y + x, to the last bit."""
    here, there = evaluate(case), evaluate(case.with_inputs(x=case["y"], y=case["x"]))
    yield equals_exactly(here.output, there.output)


def adding_zero_changes_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """x + 0 = x, exactly."""
    output = evaluate(case.with_inputs(y=np.zeros_like(case["y"]))).output
    yield equals_exactly(output, case["x"].astype(dtype.wide))


def a_number_and_its_negative_cancel(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """x + (-x) = 0, exactly, where x is finite; else NaN."""
    output = evaluate(case.with_inputs(y=-case["x"])).output
    expected = np.where(np.isfinite(case["x"].astype(dtype.wide)), 0, np.nan)
    yield equals_exactly(output, expected)


def gradients_are_the_cotangent(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradients of x and y are both the cotangent, to the last bit."""
    for gradient in evaluate(case).gradients.values():
        yield equals_exactly(gradient, case.grad_output.astype(dtype.wide))


ARGUMENTS = Arguments(x=tensor("..."), y=tensor("..."))


operation = Operation(
    name="vector_add",
    forward=oracle.forward,
    backward=oracle.backward,
    differentiable=("x", "y"),
    cases=SUMMANDS.cases,
    examples=examples,
    batched=SUMMANDS.batched,
    laws=(
        the_order_of_the_terms_does_not_matter,
        adding_zero_changes_nothing,
        a_number_and_its_negative_cancel,
        gradients_are_the_cotangent,
    ),
    errors=ARGUMENTS.errors,
    workloads=SUMMANDS.workloads,
    axes=ARGUMENTS.axes,
    sized=Sized({"...": 1}, lambda sizes: random_case(sizes["..."])),
    source="torch.add",
)
