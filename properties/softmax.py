"""softmax over the last axis."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from oracles import softmax as oracle
from properties.array_strategies import (
    GENERATORS,
    KINDS,
    arrays,
    cotangent,
    layouts_for,
    repeated,
    rows_and_cols,
    values,
)
from properties.case import Case
from properties.dtypes import DType
from properties.operation import Cost, DeclaredError, Evaluate, Operation, Relation
from properties.running_error import Bounded, stored, total
from properties.special_values import not_finite_in_turn
from properties.workloads import Make, tiled, whole


def backward(grad_output: Any, x: Any) -> tuple[Any]:
    """The oracle's, from the output as a kernel keeps it: rounded to the tested type."""
    return oracle.backward(grad_output, stored(oracle.forward(x)))


def masked(rng: np.random.Generator, x: np.ndarray, share: float) -> np.ndarray:
    """Some entries replaced by -inf, as attention masks them."""
    return np.where(rng.random(x.shape) < share, np.array(-np.inf, dtype=x.dtype), x)


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Rows under none to three leading axes, now and then masked in part or as a whole."""
    shape = draw(rows_and_cols(elements))
    # The difference of two huge numbers overflows, after which nothing is known of a row.
    x = draw(arrays(dtype, shape, tuple(kind for kind in KINDS if kind != "huge")))
    rng = draw(GENERATORS)
    if draw(st.integers(0, 3)) == 3:
        x = masked(rng, x, draw(st.sampled_from((0.1, 0.5, 0.95))))
    grad_output = cotangent(rng, shape, dtype)
    layouts = draw(layouts_for("x", "grad_output"))
    if layouts["x"] == "expanded":
        x = repeated(x)
    if layouts["grad_output"] == "expanded":
        # As sum().backward() and a loss that takes one column make it.
        grad_output = repeated(grad_output, draw(st.sampled_from((0, -1))))
    return Case(inputs={"x": x}, grad_output=grad_output, layouts=layouts)


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """One or two rows of two to four columns."""
    rng = draw(GENERATORS)
    shape = (draw(st.integers(1, 2)), draw(st.integers(2, 4)))
    return Case({"x": values(rng, shape, dtype, "normal")}, cotangent(rng, shape, dtype))


def example(x: Any, **layouts: str) -> Callable[[DType], Case]:
    """A named case of explicit numbers."""

    def make(dtype: DType) -> Case:
        given = np.array(x, dtype=np.float64).astype(dtype.numpy)
        grad_output = np.linspace(-1.5, 2, given.size).reshape(given.shape).astype(dtype.numpy)
        return Case({"x": given}, grad_output, layouts=layouts)

    return make


def random_rows(*shape: int, kind: str = "normal", **layouts: str) -> Callable[[DType], Case]:
    """A named case of random rows."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(7)
        return Case({"x": values(rng, shape, dtype, kind)}, cotangent(rng, shape, dtype), layouts=layouts)

    return make


def long_row(kib: int, more: int) -> Callable[[DType], Case]:
    """A named case of one row of so many KiB and some elements: 536 KiB are 274,432 columns of a half type."""
    return lambda dtype: random_rows(1, kib * 1024 // dtype.numpy.itemsize + more)(dtype)


def largest_and_lowest(dtype: DType) -> Case:
    """Half of the largest number and its negative, whose difference is still finite; and rows of one of them alone."""
    half = dtype.largest / 2
    return example([[half, -half, 0.0], [half, half, half], [-half, -half, -half], [-half, 0.0, 1.0]])(dtype)


def causal_mask(dtype: DType) -> Case:
    """Row i of 33 sees the first i columns; the first row sees none and is NaN."""
    rng = np.random.default_rng(8)
    x = values(rng, (33, 33), dtype, "normal")
    x[np.triu_indices(33)] = -np.inf
    return Case({"x": x}, cotangent(rng, (33, 33), dtype))


def largest_first(dtype: DType) -> Case:
    """A long row whose first entry is the largest: exp overflows where it is not taken off."""
    case = random_rows(1, 16392)(dtype)
    x = case["x"].copy()
    x[0, 0] = 1000
    return case.with_inputs(x=x)


def late_maximum(dtype: DType) -> Case:
    """Long rows for which a sum taken on the way must be rescaled: from nothing but -inf, and again and again."""
    cols = 160 * 1024 // dtype.numpy.itemsize + 16
    rng = np.random.default_rng(9)
    x = np.stack([np.full(cols, -np.inf), np.sort(rng.normal(0, 2, cols))])
    x[0, -1] = 40
    return Case({"x": x.astype(dtype.numpy)}, cotangent(rng, x.shape, dtype))


def each_entry_in_turn_not_finite(dtype: DType) -> Case:
    """17 columns: a vector's lanes, and a tail of one."""
    rng = np.random.default_rng(14)
    x = not_finite_in_turn(rng, 17, dtype)
    return Case({"x": x}, cotangent(rng, x.shape, dtype))


examples: Mapping[str, Callable[[DType], Case]] = {
    "no_rows": random_rows(0, 5),
    "no_columns": random_rows(3, 0),
    "no_rows_and_no_columns": random_rows(0, 0),
    "one_column": random_rows(5, 1),
    "two_columns": example([[0.0, 1.0], [3.0, 3.0], [-4.0, 4.0]]),
    "one_row_without_leading_axes": random_rows(7),
    # exp(1000) overflows; without the maximum taken off, NaN.
    "large_values": example([[1000.0, 999.0, -1000.0], [-1000.0, -1001.0, -999.0]]),
    "largest_and_lowest": largest_and_lowest,
    "rows_not_finite": example(
        [
            [-np.inf, -np.inf, -np.inf, -np.inf],
            [np.inf, 0.0, 1.0, 2.0],
            [np.inf, -np.inf, 1.0, 2.0],
            [1.0, 2.0, np.nan, 3.0],
            [1.0, 2.0, 3.0, np.nan],
            [-np.inf, np.nan, -np.inf, -np.inf],
            [-np.inf, 0.0, -np.inf, 1.0],
            [0.0, 1.0, 2.0, 3.0],
        ]
    ),
    "each_entry_in_turn_not_finite": each_entry_in_turn_not_finite,
    "causal_mask": causal_mask,
    "equal_entries": example(np.full((2, 24), 0.5)),
    # The tail of a vector, of a warp, and of the last block, and one column past each.
    "columns_not_a_multiple_of_16": random_rows(3, 15),
    "one_warp_and_one_column": random_rows(3, 33),
    "one_short_of_1024_columns": random_rows(2, 1023),
    "one_past_1024_columns": random_rows(2, 1025),
    "one_past_4096_columns": random_rows(1, 4097),
    "many_short_rows": random_rows(700, 3),
    # A sum of bfloat16 in bfloat16 stops growing at 256.
    "long_row": random_rows(1, 16384),
    # Registers of a block hold no more: it has all its 1024 threads.
    "longest_row_in_registers": random_rows(1, 32768),
    "row_of_31_warps": long_row(62, 0),
    "largest_first": largest_first,
    "late_maximum": late_maximum,
    # A block has 256 KiB of registers, for other things too, and 227 KiB of shared memory; a cluster, eight times that.
    "row_longer_than_registers": long_row(160, 0),
    "rows_longer_than_registers": random_rows(2, 34008),
    "row_longer_than_registers_and_shared_memory": long_row(256, 1),
    "row_longer_than_registers_of_a_cluster": long_row(536, 0),
    "rows_longer_than_registers_along_two_axes": random_rows(2, 2, 33000, x="transposed", grad_output="transposed"),
    "rows_with_gaps": random_rows(5, 64, x="sliced_rows", grad_output="sliced_rows"),
    "columns_with_gaps": random_rows(5, 32, x="sliced_columns", grad_output="sliced_columns"),
    "rows_one_element_too_wide": random_rows(5, 64, x="cut_from_wider", grad_output="cut_from_wider"),
    "misaligned": random_rows(5, 64, x="misaligned", grad_output="misaligned"),
    "transposed": random_rows(64, 40, x="transposed", grad_output="transposed"),
    # Rows along two axes that no single stride passes.
    "three_axes_each_in_another_order": random_rows(3, 4, 8, x="transposed", grad_output="axes_reversed"),
    "four_axes_each_in_another_order": random_rows(3, 2, 5, 8, x="transposed", grad_output="axes_reversed"),
    "five_axes_each_in_another_order": random_rows(2, 3, 2, 3, 4, x="axes_reversed", grad_output="transposed"),
}


def finite_rows(case: Case) -> np.ndarray:
    """``[..., 1]``: rows whose softmax is a distribution: neither NaN nor +inf in them, and not only -inf."""
    x = case["x"].astype(np.float64)
    return np.isfinite(np.max(x, axis=-1, keepdims=True, initial=-np.inf))


def only(where: np.ndarray, result: Bounded) -> Bounded:
    """A result of which a law speaks in some places only."""
    where = np.broadcast_to(where, result.shape)
    return Bounded(np.where(where, result.value, 0), np.where(where, result.error, 0), result.arithmetic)


def exactly(value: Any, like: Bounded) -> Bounded:
    """A value that a law gives without error."""
    return Bounded.exact(np.broadcast_to(np.asarray(value, dtype=like.value.dtype), like.shape), like.arithmetic)


def columns(case: Case, order: Any) -> Case:
    """The case with its columns, and those of the cotangent, in another order or fewer."""
    return Case({"x": case["x"][..., order]}, case.grad_output[..., order])


def rows_sum_to_one(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The entries of a row sum to 1."""
    rows = finite_rows(case)
    sums = total(only(rows, evaluate(case).output), axis=-1, keepdims=True)
    yield Relation(sums, exactly(np.where(rows, 1, 0), sums))


def entries_lie_between_zero_and_one(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """0 <= softmax(x) <= 1."""
    output = evaluate(case).output
    yield Relation(output, exactly(np.clip(output.value, 0, 1), output))


def adding_a_number_to_a_row_changes_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """softmax(x + t) = softmax(x) for each row to which adding t is exact, and so is the gradient."""
    x: np.ndarray = case["x"].astype(dtype.wide)
    with np.errstate(invalid="ignore", over="ignore"):
        there = (x + 16).astype(dtype.numpy)
        unmoved = (there.astype(dtype.wide) - 16 == x) | ~np.isfinite(x)
    rows = unmoved.all(axis=-1, keepdims=True)
    here, moved = evaluate(case), evaluate(case.with_inputs(x=there))
    yield Relation(only(rows, here.output), only(rows, moved.output))
    yield Relation(only(rows, here.gradients["x"]), only(rows, moved.gradients["x"]))


def columns_may_change_places(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Reordering the columns reorders the output and the gradient."""
    order = np.random.default_rng(case["x"].size).permutation(case["x"].shape[-1])
    here, there = evaluate(case), evaluate(columns(case, order))
    yield Relation(here.output[..., order], there.output)
    yield Relation(here.gradients["x"][..., order], there.gradients["x"])


def masked_columns_add_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Columns of -inf before and after the others get 0 and gradient 0, and leave the rest as it is."""
    rows = finite_rows(case)
    width = [(0, 0)] * (case["x"].ndim - 1) + [(1, 2)]
    wider = Case(
        {"x": np.pad(case["x"], width, constant_values=-np.inf)}, np.pad(case.grad_output, width, constant_values=1.5)
    )
    here, there = evaluate(case), evaluate(wider)
    for narrow, wide in ((here.output, there.output), (here.gradients["x"], there.gradients["x"])):
        yield Relation(narrow, wide[..., 1:-2])
        for outside in (wide[..., :1], wide[..., -2:]):
            beside = only(rows, Bounded.exact(outside.value, outside.arithmetic))
            yield Relation(beside, exactly(0, beside))


def gradients_of_a_row_sum_to_zero(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """As the entries always sum to 1, no change of a row may raise them all."""
    sums = total(only(finite_rows(case), evaluate(case).gradients["x"]), axis=-1)
    yield Relation(sums, exactly(0, sums))


def a_constant_cotangent_gives_no_gradient(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Where the cotangent is the same along a row, its gradient is 0."""
    constant = np.full_like(case.grad_output, -1.5)
    gradient = only(finite_rows(case), evaluate(Case(case.inputs, constant)).gradients["x"])
    yield Relation(gradient, exactly(0, gradient))


def a_row_does_not_see_the_others(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The last row alone gives what it gives among the others."""
    rows = case["x"].reshape(-1, case["x"].shape[-1]) if case["x"].size else case["x"][:0]
    if not rows.size:
        return
    here = evaluate(case)
    alone = evaluate(Case({"x": rows[-1]}, case.grad_output.reshape(rows.shape)[-1]))
    for among, by_itself in ((here.output, alone.output), (here.gradients["x"], alone.gradients["x"])):
        yield Relation(among.reshape(rows.shape)[-1], by_itself)


errors = (
    DeclaredError(name="no_axis", arguments=lambda d: {"x": torch.ones((), device=d)}, raises=ValueError, names="x"),
    DeclaredError(
        name="integers",
        arguments=lambda d: {"x": torch.ones(2, 3, dtype=torch.int64, device=d)},
        raises=TypeError,
        names="x",
    ),
    DeclaredError(
        name="complex_numbers",
        arguments=lambda d: {"x": torch.ones(2, 3, dtype=torch.complex64, device=d)},
        raises=TypeError,
        names="x",
    ),
    DeclaredError(name="no_tensor", arguments=lambda d: {"x": [1.0, 2.0]}, raises=TypeError, names="x"),
)


def cost(case: Case) -> tuple[Cost, Cost]:
    """The input in and the output out; backward the output and the cotangent in, the gradient out."""
    x = case["x"]
    return Cost(2 * x.nbytes, 5 * x.size), Cost(3 * x.nbytes, 4 * x.size)


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(random_rows(32, 256)), "ragged": whole(random_rows(17, 1001))},
    "cuda": {
        "small": whole(random_rows(128, 256)),
        "large": tiled(random_rows(32, 4096), 1024, "x"),
        "long_rows": tiled(random_rows(16, 65536), 256, "x"),
        "ragged": tiled(random_rows(33, 1001), 256, "x"),
    },
}

operation = Operation(
    name="softmax",
    forward=oracle.forward,
    backward=backward,
    differentiable=("x",),
    cases=cases,
    examples=examples,
    smooth=smooth,
    batched={"x": 1},
    laws=(
        rows_sum_to_one,
        entries_lie_between_zero_and_one,
        adding_a_number_to_a_row_changes_nothing,
        columns_may_change_places,
        masked_columns_add_nothing,
        gradients_of_a_row_sum_to_zero,
        a_constant_cotangent_gives_no_gradient,
        a_row_does_not_see_the_others,
    ),
    errors=errors,
    cost=cost,
    workloads=workloads,
    source="Bridle, Probabilistic interpretation of feedforward classification network outputs, Neurocomputing 1990",
)
