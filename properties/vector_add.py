"""vector_add: elementwise sum of two arrays of one shape."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from oracles import vector_add as oracle
from properties.array_strategies import (
    GENERATORS,
    arrays,
    cotangent,
    layouts_for,
    leading_axes,
    repeated,
    sizes,
    values,
)
from properties.case import Case
from properties.dtypes import DType
from properties.operation import Cost, DeclaredError, Evaluate, Operation, Relation
from properties.running_error import Bounded
from properties.workloads import Make, tiled, whole


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Two arrays of none to three axes."""
    shape = draw(leading_axes(draw(sizes(elements))))
    x, y = draw(arrays(dtype, shape)), draw(arrays(dtype, shape))
    grad_output = cotangent(draw(GENERATORS), shape, dtype)
    layouts = draw(layouts_for("x", "y", "grad_output"))
    if layouts["x"] == "expanded":
        x = repeated(x)
    if layouts["y"] == "expanded":
        y = repeated(y, -1)
    if layouts["grad_output"] == "expanded":
        grad_output = repeated(grad_output)
    return Case(inputs={"x": x, "y": y}, grad_output=grad_output, layouts=layouts)


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """One to six elements."""
    rng = draw(GENERATORS)
    shape = (draw(st.integers(1, 6)),)
    x, y = values(rng, shape, dtype, "normal"), values(rng, shape, dtype, "normal")
    return Case({"x": x, "y": y}, cotangent(rng, shape, dtype))


def random_case(*shape: int, **layouts: str) -> Callable[[DType], Case]:
    """A named case of random numbers."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(6)
        x, y = values(rng, shape, dtype, "normal"), values(rng, shape, dtype, "spread")
        x, y = (repeated(a) if layouts.get(name) == "expanded" else a for name, a in (("x", x), ("y", y)))
        return Case({"x": x, "y": y}, cotangent(rng, shape, dtype), layouts=layouts)

    return make


def special_sums(dtype: DType) -> Case:
    """Infinities that cancel, sums past the largest number, signed zeros and the smallest numbers."""
    most, least = dtype.largest, dtype.smallest_subnormal
    special = np.array([np.inf, -np.inf, np.nan, most, -most, 0.0, -0.0, least, -least, 1.0])
    x, y = (a.reshape(-1).astype(dtype.numpy) for a in np.meshgrid(special, special))
    return Case({"x": x, "y": y}, np.linspace(-2, 3, x.size).astype(dtype.numpy))


examples: Mapping[str, Callable[[DType], Case]] = {
    "no_elements": random_case(0),
    "no_rows": random_case(0, 3),
    "one_number_without_axes": random_case(),
    "one_element": random_case(1),
    # The tail of the last block: one element short of a block and of two, one past them, and blocks in full.
    "one_short_of_a_block": random_case(1023),
    "a_block": random_case(1024),
    "one_past_a_block": random_case(1025),
    "blocks_and_a_tail": random_case(3 * 4096 + 5),
    "blocks_in_full": random_case(2, 4, 2048),
    # A pointer that is not a multiple of 16 bytes, beside one that is.
    "one_input_misaligned": random_case(1027, y="misaligned"),
    "both_misaligned": random_case(1027, x="misaligned", y="misaligned"),
    "one_transposed": random_case(33, 65, y="transposed"),
    "both_transposed": random_case(33, 65, x="transposed", y="transposed"),
    "three_axes_each_in_another_order": random_case(3, 4, 5, x="axes_reversed", y="transposed"),
    "four_axes_each_in_another_order": random_case(3, 5, 2, 7, x="axes_reversed", y="transposed"),
    "five_axes_each_in_another_order": random_case(2, 3, 2, 3, 2, x="axes_reversed", y="transposed"),
    "a_row_for_all": random_case(7, 100, y="expanded"),
    "columns_apart": random_case(5, 33, x="sliced_columns", y="sliced_rows"),
    "rows_one_element_too_wide": random_case(9, 64, x="cut_from_wider"),
    "special_sums": special_sums,
}


def exactly(value: Any, like: Bounded) -> Bounded:
    """A value that a law gives without error."""
    return Bounded.exact(np.broadcast_to(np.asarray(value, dtype=like.value.dtype), like.shape), like.arithmetic)


def the_order_of_the_terms_does_not_matter(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """x + y = y + x, to the last bit."""
    here, there = evaluate(case), evaluate(case.with_inputs(x=case["y"], y=case["x"]))
    yield Relation(exactly(here.output.value, here.output), exactly(there.output.value, there.output))


def adding_zero_changes_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """x + 0 = x, exactly."""
    output = evaluate(case.with_inputs(y=np.zeros_like(case["y"]))).output
    yield Relation(exactly(output.value, output), exactly(case["x"].astype(dtype.wide), output))


def a_number_and_its_negative_cancel(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """x + (-x) = 0, exactly, where x is finite; else NaN."""
    output = evaluate(case.with_inputs(y=-case["x"])).output
    expected = np.where(np.isfinite(case["x"].astype(dtype.wide)), 0, np.nan)
    yield Relation(exactly(output.value, output), exactly(expected, output))


def gradients_are_the_cotangent(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradients of x and y are both the cotangent, to the last bit."""
    for gradient in evaluate(case).gradients.values():
        yield Relation(exactly(gradient.value, gradient), exactly(case.grad_output.astype(dtype.wide), gradient))


def arguments(device: str, **changes: Any) -> dict[str, Any]:
    """Good arguments, with some of them changed."""
    return {"x": torch.ones(2, 3, device=device), "y": torch.ones(2, 3, device=device), **changes}


def wrong(name: str, raises: type[Exception], names: str, **changes: Callable[[str], Any]) -> DeclaredError:
    """Bad input: good arguments with some replaced by what a function makes for a device."""
    return DeclaredError(
        name=name,
        arguments=lambda d: arguments(d, **{key: make(d) for key, make in changes.items()}),
        raises=raises,
        names=names,
    )


errors = (
    wrong("another_length", ValueError, "y", y=lambda d: torch.ones(2, 4, device=d)),
    wrong("a_row_that_would_broadcast", ValueError, "y", y=lambda d: torch.ones(3, device=d)),
    wrong("an_axis_of_one_that_would_broadcast", ValueError, "y", y=lambda d: torch.ones(2, 1, device=d)),
    wrong("a_number_that_would_broadcast", ValueError, "y", y=lambda d: torch.ones((), device=d)),
    wrong("transposed_shape", ValueError, "y", y=lambda d: torch.ones(3, 2, device=d)),
    wrong("python_number", TypeError, "y", y=lambda d: 1.0),
    wrong("no_tensor", TypeError, "x", x=lambda d: [[1.0, 2.0, 3.0]] * 2),
    wrong("integers", TypeError, "x", x=lambda d: torch.ones(2, 3, dtype=torch.int64, device=d)),
    wrong("two_dtypes", TypeError, "y", y=lambda d: torch.ones(2, 3, dtype=torch.float64, device=d)),
    wrong("two_devices", ValueError, "y", y=lambda d: torch.ones(2, 3, device="meta")),
)


def cost(case: Case) -> tuple[Cost, Cost]:
    """Both arrays in and one out; backward hands the cotangent on and moves nothing."""
    x = case["x"]
    return Cost(3 * x.nbytes, x.size), Cost(0, 0)


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(random_case(1 << 14)), "ragged": whole(random_case(7, 1001))},
    "cuda": {
        "small": whole(random_case(1 << 14)),
        "large": tiled(random_case(1 << 18), 1024, "x", "y"),
        "ragged": tiled(random_case(33, 1001), 512, "x", "y"),
    },
}

operation = Operation(
    name="vector_add",
    forward=oracle.forward,
    backward=oracle.backward,
    differentiable=("x", "y"),
    cases=cases,
    examples=examples,
    smooth=smooth,
    batched={"x": 0, "y": 0},
    laws=(
        the_order_of_the_terms_does_not_matter,
        adding_zero_changes_nothing,
        a_number_and_its_negative_cancel,
        gradients_are_the_cotangent,
    ),
    errors=errors,
    cost=cost,
    workloads=workloads,
    source="torch.add",
)
