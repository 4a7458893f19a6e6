"""The record of swiglu: two arrays of one shape, the gate and what it lets through."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from fourfold.oracles import swiglu as oracle

from fourfold.inputs.elementwise import Elementwise
from fourfold.numerics.bounded import Bounded, unspecified_where
from fourfold.numerics.dtypes import DType
from fourfold.operations.arguments import tensor
from fourfold.operations.case import Case
from fourfold.operations.declared_errors import Arguments
from fourfold.operations.record import Evaluate, Operation, Relation, Sized
from fourfold.operations.relations import equals_exactly, only

PAIRS = Elementwise(gate="spread", up="normal")
random_case = PAIRS.random
examples: Mapping[str, Callable[[DType], Case]] = {**PAIRS.examples, "special_pairs": PAIRS.special_numbers}


def backward(grad_output: Any, gate: Any, up: Any) -> tuple[Any, Any]:
    """The oracle's gradients. That of gate is unspecified where cotangent, up and gate have a product that overflows.

    sigmoid(-gate) may be taken as 1 - sigmoid(gate), as torch does, whose small values lose digits.
    """
    grad_gate, grad_up = oracle.backward(grad_output, gate, up)
    if not isinstance(grad_gate, Bounded):
        return grad_gate, grad_up
    arithmetic = grad_gate.arithmetic
    with np.errstate(all="ignore"):
        product, x = abs(grad_output.value * up.value), gate.value
        rest = oracle.sigmoid(-x)
        lost = np.where(rest < arithmetic.roundoff / 4, rest, 4 * arithmetic.roundoff)  # below, 1 - sigmoid is 0
        lost *= product * oracle.sigmoid(x) * abs(x)
    found = Bounded(grad_gate.value, grad_gate.error + np.where(np.isfinite(lost), lost, 0), arithmetic)
    kept = (arithmetic.rounds_each_step and arithmetic.storage) or arithmetic
    with np.errstate(all="ignore"):
        product = product * np.maximum(abs(x), 1)
    # An infinity that is given comes to the right result here; others multiply it by 0, in whichever order.
    overflows = (product >= kept.largest / 2) & (np.isfinite(product) | (not arithmetic.documented_ties))
    return unspecified_where(found, overflows), grad_up


def output_is_linear_in_up(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Half of up gives half of the output, exactly, where nothing is subnormal."""
    here, half = evaluate(case).output, evaluate(case.with_inputs(up=case["up"] / 2)).output
    smallest = np.minimum(abs(here.value), abs(case["up"].astype(dtype.wide)))
    normal = np.isfinite(here.value) & (smallest > 4 * dtype.smallest_normal)
    yield equals_exactly(only(normal, half), only(normal, here / 2))


def a_gate_and_its_negative_add_up(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """silu(x) - silu(-x) = x, times up."""
    here, there = evaluate(case).output, evaluate(case.with_inputs(gate=-case["gate"])).output
    with np.errstate(all="ignore"):
        whole: np.ndarray = case["gate"].astype(dtype.wide) * case["up"].astype(dtype.wide)
    rows = np.isfinite(whole) & (abs(whole) < dtype.largest)
    yield Relation(only(rows, here - there), only(rows, Bounded(whole, np.zeros_like(whole), here.arithmetic)))


ARGUMENTS = Arguments(gate=tensor("..."), up=tensor("..."))

operation = Operation(
    name="swiglu",
    forward=oracle.forward,
    backward=backward,
    differentiable=("gate", "up"),
    cases=PAIRS.cases,
    examples=examples,
    batched=PAIRS.batched,
    laws=(output_is_linear_in_up, a_gate_and_its_negative_add_up),
    errors=ARGUMENTS.errors,
    workloads=PAIRS.workloads,
    axes=ARGUMENTS.axes,
    sized=Sized({"...": 1}, lambda sizes: random_case(sizes["..."])),
    source="N. Shazeer, GLU Variants Improve Transformer, 2020",
)
