"""The record of topk: the largest or smallest numbers of rows, and where they are. Of equal numbers any is right."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from fourfold.oracles import topk as oracle
from hypothesis import strategies as st

from fourfold.declaration.library import arguments_of
from fourfold.inputs.arrays import GENERATORS, arrays, cotangent, layouts_for, repeat_first, rows_and_cols, values
from fourfold.inputs.rows import row_examples
from fourfold.inputs.special_values import not_finite_in_turn
from fourfold.numerics.bounded import Bounded, OneOf
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Operation, Relation, Sized
from fourfold.operations.relations import equal_where, equals_exactly
from fourfold.operations.workloads import Make, tiled, whole

# ---- the right results


def alike(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return a mask of the numbers that are equal, or both NaN."""
    return (one == other) | (np.isnan(one) & np.isnan(other))


def right_values(x: Any, k: int, largest: bool = True) -> Any:
    """Return the oracle's values. They are given numbers, and no more wrong than any of these."""
    if not isinstance(x, Bounded):
        return oracle.forward(x, k, largest)[0]
    given = np.max(x.error, axis=-1, keepdims=True, initial=0)
    found = oracle.forward(x.value, k, largest)[0]
    return OneOf(found, x.arithmetic).within(np.broadcast_to(given, found.shape))


def repair_places(at: np.ndarray, right: np.ndarray, numbers: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Return a row of places; wrong or repeated ones are replaced by the first unused places of equal numbers."""
    chosen = {index: place for place, index in reversed([*enumerate(at.tolist())]) if right[place]}
    expected = at.copy()
    for place in sorted({*range(len(at))} - {*chosen.values()}):
        of_value = np.flatnonzero(alike(numbers, found[place])).tolist()
        expected[place] = next(index for index in of_value if index not in chosen)
        chosen[int(expected[place])] = place
    return expected


def right_indices(x: Bounded, k: int, largest: bool = True) -> Bounded:
    """Return the oracle's places. Those of equal numbers may be others among these, each of them once."""
    found, indices = oracle.forward(x.value, k, largest)

    def nearest(actual: np.ndarray) -> np.ndarray:
        if not actual.size:
            return actual
        n, expected = x.shape[-1], actual.copy()
        within = (actual >= 0) & (actual < n) & (actual == np.trunc(actual))
        at = np.where(within, actual, 0).astype(np.int64)
        right = within & alike(np.take_along_axis(x.value, at, axis=-1), found)
        in_order = np.sort(np.where(right, at, -1 - np.arange(k)), axis=-1)
        wrong = ~right.all(axis=-1) | (in_order[..., 1:] == in_order[..., :-1]).any(axis=-1)
        for row in map(tuple, np.argwhere(wrong)):
            expected[row] = repair_places(at[row], right[row], x.value[row], found[row])
        return expected

    return OneOf(indices.astype(x.value.dtype), x.arithmetic, nearest)


def backward(grad_values: Any, x: Any, k: int, largest: bool = True) -> tuple[Any]:
    """Return the oracle's gradient. Among equal numbers cotangents may go to others, each of them to one."""
    if not isinstance(x, Bounded):
        return (oracle.backward(grad_values, x, k, largest),)
    gradient = oracle.backward(grad_values.value, x.value, k, largest)
    error = oracle.backward(grad_values.error, x.value, k, largest)
    order = oracle.order(x.value, largest)
    in_order = np.take_along_axis(x.value, order, axis=-1)
    differs = ~alike(in_order[..., 1:], in_order[..., :-1])
    group = np.zeros(x.shape, np.int64)
    np.cumsum(differs, axis=-1, out=group[..., 1:])

    def by_group(array: np.ndarray) -> np.ndarray:
        return np.lexsort((array, group), axis=-1)

    def nearest(actual: np.ndarray) -> np.ndarray:
        given, taken = (np.take_along_axis(array, order, axis=-1) for array in (gradient, actual))
        matched, expected = np.empty_like(gradient), np.empty_like(gradient)
        rising = np.take_along_axis(given, by_group(given), axis=-1)
        np.put_along_axis(matched, by_group(taken), rising, axis=-1)
        np.put_along_axis(expected, order, matched, axis=-1)
        return expected

    return (OneOf(gradient, x.arithmetic, nearest).within(error),)


def admissible(case: Case, results: Mapping[str, np.ndarray]) -> str | None:
    """Check that values are the numbers at the indices of the same call, and that cotangents go to these."""
    values, indices = results["values"], results["indices"].astype(np.int64)
    x, shape = case["x"].astype(values.dtype), case.grad_output.shape
    if values.shape != shape or indices.shape != shape or np.any((indices < 0) | (indices >= max(x.shape[-1], 1))):
        return f"values or indices are not of shape {list(shape)}, or an index is out of range"
    if not np.all(alike(np.take_along_axis(x, indices, axis=-1), values)):
        return "values are not the numbers at the indices"
    gradient = results.get("gradient of x")
    if gradient is not None:
        expected = np.zeros_like(gradient)
        np.put_along_axis(expected, indices, case.grad_output.astype(gradient.dtype), axis=-1)
        if not np.all(alike(gradient, expected) | np.isnan(x)):
            return "the gradient of x is not the cotangent at the indices"
    return None


# ---- cases


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw few long rows or many short ones, and a k that is small, any number, or the whole row."""
    shape = draw(rows_and_cols(elements))
    x, rng, n = draw(arrays(dtype, shape)), draw(GENERATORS), shape[-1]
    k = min((n, int(rng.integers(0, n + 1)), int(rng.integers(1, 9)))[rng.choice(3, p=[0.2, 0.3, 0.5])], n)
    layouts = draw(layouts_for("x", "grad_output"))
    grad_output = cotangent(rng, (*shape[:-1], k), dtype)
    if layouts["x"] == "expanded":
        x = repeat_first(x)
    if layouts["grad_output"] == "expanded":
        grad_output = repeat_first(grad_output, draw(st.sampled_from((0, -1))))
    return Case({"x": x}, grad_output, {"k": k, "largest": draw(st.booleans())}, layouts)


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """Draw one to three rows of two to five numbers that are far from one another."""
    rng = draw(GENERATORS)
    shape = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    x = (rng.permuted(np.broadcast_to(np.arange(shape[1]) - 2.0, shape), axis=-1) + rng.uniform(-0.2, 0.2, shape)) * 2
    k = draw(st.integers(1, shape[1]))
    grad_output = cotangent(rng, (shape[0], k), dtype)
    return Case({"x": x.astype(dtype.numpy)}, grad_output, {"k": k, "largest": draw(st.booleans())})


def example(of: Any, k: int, largest: bool = True, **layouts: str) -> Callable[[DType], Case]:
    """Return a named case of given rows, or of a function that makes them."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(47)
        x = np.asarray(of(rng, dtype) if callable(of) else of).astype(dtype.numpy)
        grad_output = cotangent(rng, (*x.shape[:-1], k), dtype)
        return Case({"x": x}, grad_output, {"k": k, "largest": largest}, layouts)

    return make


def rows(
    *shape: int, k: int | None = None, kind: str = "normal", largest: bool = True, **layouts: str
) -> Callable[[DType], Case]:
    """Return a named case of random rows, with k = 3 by default."""
    k = min(3, shape[-1]) if k is None else k
    return example(lambda rng, dtype: values(rng, shape, dtype, kind), k, largest, **layouts)


examples: Mapping[str, Callable[[DType], Case]] = {
    **row_examples(rows),
    "none_wanted": rows(3, 5, k=0),
    "all_wanted": rows(3, 33, k=33),
    "all_wanted_from_the_smallest": rows(3, 33, k=33, largest=False),
    "the_largest_alone": rows(4, 40, k=1),
    "the_smallest_alone": rows(4, 40, k=1, largest=False),
    # More than one program or block orders, and more than a warp.
    "many_wanted": rows(2, 700, k=300),
    "many_wanted_from_the_smallest": rows(2, 700, k=300, largest=False),
    # A row of several tiles, whose largest number lies in the last one, and those equal to the k-th in both.
    "a_long_row": example(np.where(np.arange(8197) == 8196, 40, np.arange(8197) // 300)[None], 95),
    "a_long_row_from_the_smallest": example(
        -np.where(np.arange(8197) == 8196, 40, np.arange(8197) // 300)[None], 95, False
    ),
    # Of other numbers few are collected; of equal ones too many.
    "a_long_row_of_other_numbers": rows(1, 8300, k=70),
    "more_alike_than_are_collected": rows(2, 1500, k=70, kind="constant"),
    "more_alike_than_are_collected_from_the_smallest": rows(2, 1500, k=70, kind="constant", largest=False),
    # A warp may own such a row of whole vectors: with several vectors a lane, with the chosen numbers in the few lanes
    # that have one more, with equal numbers, and with one NaN in a lane that has no other chosen number.
    "whole_vectors": rows(2, 2048, k=12),
    "whole_vectors_that_grow": example(np.tile(np.arange(2072), (24, 1)), 12),
    "whole_vectors_alike": rows(3, 512, k=12, kind="whole"),
    "whole_vectors_with_nan": example(np.where(np.arange(128) == 5, np.nan, np.arange(128))[None], 4),
    "more_wanted_than_a_block_sorts": rows(2, 1300, k=600),
    # A row that is padded with 0, or with -infinity, has nothing below these.
    "below_zero": example(lambda rng, dtype: -1 - abs(values(rng, (3, 21), dtype, "normal")), 20),
    "above_zero_from_the_smallest": example(lambda rng, dtype: 1 + abs(rng.normal(0, 2, (3, 21))), 20, largest=False),
    "all_minus_infinity": example(np.full((2, 21), -np.inf), 19),
    "all_infinity_from_the_smallest": example(np.full((2, 21), np.inf), 19, largest=False),
    "all_nan": example(np.full((2, 5), np.nan), 3),
    "all_alike": rows(3, 300, k=70, kind="constant"),
    "many_alike": rows(3, 300, k=70, kind="whole"),
    "alike_from_the_smallest": rows(3, 300, k=70, kind="whole", largest=False),
    # Equal in float16, and not in float32, or the other way round.
    "numbers_next_to_each_other": example(lambda rng, dtype: 1 + rng.permutation(40)[None] * dtype.roundoff * 2, 12),
    "zeros_of_both_signs": example([[0.0, -0.0, 0.0, -0.0, -1.0, 1.0, -0.0]], 5),
    "nan_is_the_largest": example([[1.0, np.nan, np.inf, -np.inf, np.nan, 2.0]], 3),
    "nan_is_not_the_smallest": example([[1.0, np.nan, np.inf, -np.inf, -np.nan, 2.0]], 5, largest=False),
    "subnormal": rows(3, 40, k=20, kind="tiny"),
    "huge": rows(3, 40, k=20, kind="huge"),
    "each_entry_in_turn_not_finite": example(lambda rng, dtype: not_finite_in_turn(rng, 17, dtype), 4),
    "cotangent_of_a_sum": rows(9, 40, grad_output="expanded"),
}

# ---- laws


def the_smallest_are_the_largest_negated(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The smallest numbers are the negated largest ones of the negated row, in rows without NaN."""
    other = case.with_inputs(x=-case["x"]).with_parameters(largest=not case.parameters["largest"])
    numbers = ~np.isnan(case["x"].astype(dtype.wide)).any(axis=-1, keepdims=True)
    yield equal_where(numbers, -evaluate(other).output, evaluate(case).output)


def fewer_are_the_first_of_more(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """A call for half as many returns the first values of this call."""
    half = case.parameters["k"] // 2
    fewer = replace(case, grad_output=case.grad_output[..., :half], layouts={}).with_parameters(k=half)
    yield Relation(evaluate(fewer).output, evaluate(case).output[..., :half])


def each_cotangent_goes_to_one_place(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The numbers of a gradient's row are the cotangents and zeros, in any order."""
    gradient, n = evaluate(case).gradients["x"], case["x"].shape[-1]
    given: np.ndarray = np.zeros(case["x"].shape, dtype=dtype.wide)
    given[..., : case.parameters["k"]] = case.grad_output
    in_order = Bounded.exact(np.sort(gradient.value, axis=-1), gradient.arithmetic)
    if n:
        yield equals_exactly(in_order, np.sort(given, axis=-1))


# ---- the record

ARGUMENTS = arguments_of("topk")
errors = (*ARGUMENTS.errors, ARGUMENTS.wrong("more_than_there_are", ValueError, "k", {"k": 3}))


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads x and writes values and indices; backward reads cotangents and indices, and writes like x."""
    x, grad_output = case["x"], case.grad_output
    chosen = grad_output.nbytes + 8 * grad_output.size
    return Cost(x.nbytes + chosen, x.size), Cost(x.nbytes + chosen, 0)


def of_sizes(
    sizes: Mapping[str, int], leading: tuple[int, ...] | None = None, parameters: Mapping[str, Any] | None = None
) -> Callable[[DType], Case]:
    """Return a case of chosen sizes, with k = 3, or the k of the parameters if there are as many numbers."""
    given, n = {"k": 3, "largest": True, **(parameters or {})}, sizes["n"]
    return rows(*(leading or (sizes["..."],)), n, k=min(given["k"], n), largest=given["largest"])


def other_numbers(case: Case) -> dict[str, np.ndarray]:
    """Return the negated numbers: scaled ones are chosen at the same places."""
    return {"x": -case["x"]}


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(rows(32, 256)), "ragged": whole(rows(17, 1001, k=40))},
    "cuda": {
        "small": whole(rows(128, 256)),
        "large": tiled(rows(256, 4096, k=8), 64, "x"),
        "many": tiled(rows(256, 4096, k=256), 16, "x"),
        "long_rows": tiled(rows(4, 65536, k=64), 64, "x"),
        "longest_rows": tiled(rows(1, 131072, k=20), 32, "x"),
        "ragged": tiled(rows(33, 1001, k=40), 256, "x"),
    },
}

of_each = Operation(
    name="topk.values",
    forward=right_values,
    backward=backward,
    differentiable=("x",),
    cases=cases,
    examples=examples,
    smooth=smooth,
    batched={"x": 1},
    laws=(the_smallest_are_the_largest_negated, fewer_are_the_first_of_more, each_cotangent_goes_to_one_place),
    errors=errors,
    cost=cost,
    workloads=workloads,
    axes=ARGUMENTS.axes,
    other_numbers=other_numbers,
    sized=Sized({"...": 2, "n": 4}, of_sizes, varied=of_sizes),
    source="torch.topk",
)
operation = replace(
    of_each,
    name="topk",
    outputs={
        "values": of_each,
        "indices": replace(
            of_each,
            name="topk.indices",
            forward=right_indices,
            backward=lambda *_, **__: (),
            differentiable=(),
            laws=(),
            returns="int64",
        ),
    },
    admissible=admissible,
)
