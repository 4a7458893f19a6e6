"""The record of matmul: a matrix product followed by an activation."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from fourfold.oracles import matmul as oracle
from hypothesis import strategies as st

from fourfold.declaration.library import arguments_of
from fourfold.inputs.arrays import (
    FEW_ELEMENTS,
    GENERATORS,
    SEEDS,
    cotangent,
    explicit_arrays,
    layouts_for,
    random_size,
    repeat_first,
    values,
)
from fourfold.inputs.special_values import not_finite_in_turn
from fourfold.numerics.bounded import Bounded, stored
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Operation, Relation, Sized
from fourfold.operations.relations import equal_where, only
from fourfold.operations.workloads import Make, tiled, whole

KINDS = ("normal", "normal", "whole", "constant", "offset", "spread", "huge", "tiny")
ACTIVATIONS = ("none", "relu", "leaky_relu")
SLOPES = (0.01, 0.25, 0.0, 1.5)
# The longest side of a matrix none of whose sides is long.
MODEST = 70


def random_extents(rng: np.random.Generator, elements: int) -> tuple[int, int, int]:
    """Draw m, k and n such that neither a, b nor the result has more than `elements` elements."""
    side = min(MODEST, int(elements**0.5))
    longest = rng.choice(["none", "none", "none", "m", "k", "n"])
    if longest == "none":
        # Sometimes all are multiples of 8, which the copy engines of GPUs require.
        unit = rng.choice([1, 1, 8]) if side >= 8 else 1
        m, k, n = (random_size(rng, side // unit) * unit for _ in range(3))
    else:
        short = rng.integers(1, 5, 3)
        length = random_size(rng, elements // int(short.max()))
        m, k, n = (length if name == longest else int(size) for name, size in zip("mkn", short))
    return int(m), int(k), int(n)


@st.composite
def matrices(draw: st.DrawFn, dtype: DType, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Draw a matrix, sometimes with one special value: NaN, an infinity or negative zero."""
    if shape[0] * shape[1] <= FEW_ELEMENTS and draw(st.booleans()):
        matrix = draw(explicit_arrays(dtype, shape))
    else:
        matrix = values(np.random.default_rng(seed), shape, dtype, draw(st.sampled_from(KINDS)))
    # Only one, because each NaN or infinity spoils a row or a column of the result.
    if matrix.size and draw(st.integers(0, 7)) == 7:
        matrix.flat[draw(st.integers(0, matrix.size - 1))] = draw(st.sampled_from((np.nan, np.inf, -np.inf, -0.0)))
    return matrix


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw two matrices of any shapes that fit together, and an activation."""
    seeds = [draw(SEEDS) for _ in range(3)]
    if elements > FEW_ELEMENTS:
        # All seeds decide the extents. Hypothesis often changes one part of a case only, and would keep them.
        m, k, n = random_extents(np.random.default_rng(seeds), elements)
    else:
        m, k, n = (draw(st.integers(0, int(elements**0.5))) for _ in range(3))
    a, b = draw(matrices(dtype, (m, k), seeds[0])), draw(matrices(dtype, (k, n), seeds[1]))
    grad_output = cotangent(np.random.default_rng(seeds[2]), (m, n), dtype)
    layouts = draw(layouts_for("a", "b", "grad_output"))
    if layouts["a"] == "expanded":
        a = repeat_first(a)
    if layouts["b"] == "expanded":
        b = repeat_first(b, axis=1)
    if layouts["grad_output"] == "expanded":
        # One cotangent for all elements, as sum().backward() makes it.
        grad_output = repeat_first(repeat_first(grad_output), axis=1)
    parameters = {"activation": draw(st.sampled_from(ACTIVATIONS)), "negative_slope": draw(st.sampled_from(SLOPES))}
    return Case({"a": a, "b": b}, grad_output, parameters, layouts)


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """Draw matrices with extents up to 3, and no element of their product near 0, where activations have a kink."""
    rng = draw(GENERATORS)
    m, k, n = (draw(st.integers(1, 3)) for _ in range(3))
    a, b = rng.normal(0, 1, (m, k)), rng.normal(0, 1, (k, n))
    while abs(a @ b).min() < 0.125:
        a, b = rng.normal(0, 1, (m, k)), rng.normal(0, 1, (k, n))
    parameters = {"activation": draw(st.sampled_from(ACTIVATIONS)), "negative_slope": draw(st.sampled_from(SLOPES))}
    return Case({"a": a.astype(dtype.numpy), "b": b.astype(dtype.numpy)}, cotangent(rng, (m, n), dtype), parameters)


def example(
    a: Any,
    b: Any,
    activation: str = "none",
    negative_slope: float = 0.01,
    layouts: Mapping[str, str] | None = None,
) -> Callable[[DType], Case]:
    """Return a named case of given matrices."""

    def make(dtype: DType) -> Case:
        left, right = np.array(a, dtype=dtype.numpy), np.array(b, dtype=dtype.numpy)
        shape = left.shape[0], right.shape[1]
        grad_output = np.linspace(-1.5, 2, shape[0] * shape[1]).reshape(shape).astype(dtype.numpy)
        parameters = {"activation": activation, "negative_slope": negative_slope}
        return Case({"a": left, "b": right}, grad_output, parameters, layouts or {})

    return make


def random_example(m: int, k: int, n: int, activation: str = "none", **layouts: str) -> Callable[[DType], Case]:
    """Return a named case of random matrices."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(m + 100 * k + 10000 * n)
        inputs = {"a": values(rng, (m, k), dtype, "normal"), "b": values(rng, (k, n), dtype, "normal")}
        return Case(inputs, cotangent(rng, (m, n), dtype), {"activation": activation, "negative_slope": 0.01}, layouts)

    return make


def subnormal_factors(dtype: DType) -> Case:
    """Multiply subnormal numbers by large and small ones: a tensor core aligns them as if 2^10 times as large."""
    a = [[-0.00323295593, -4556.0, 0.000160813332, 623.5]]
    b = np.array([[3.0], [-0.0], [-1.0], [1.0]]) * dtype.wide(dtype.smallest_subnormal)
    return Case(
        {"a": np.array(a).astype(dtype.numpy), "b": b.astype(dtype.numpy)},
        np.ones((1, 1), dtype.numpy),
        {"activation": "none", "negative_slope": 0.01},
    )


def sums_past_the_digits_of_a_half_type(dtype: DType) -> Case:
    """Sum thousands of positive terms: a sum of ones stops growing at 256 in bfloat16, and at 2048 in float16."""
    inputs = {"a": np.ones((2, 2100)), "b": np.tile([1.0, 0.5, 0.75], (2100, 1))}
    grad_output = np.linspace(-1.5, 2, 6).reshape(2, 3).astype(dtype.numpy)
    return Case({name: x.astype(dtype.numpy) for name, x in inputs.items()}, grad_output, {"activation": "none"})


def cancellation(dtype: DType) -> Case:
    """Cancel each term but one by its negative, half a row away."""
    rng = np.random.default_rng(7)
    half = np.rint(rng.normal(0, 40, (3, 48)))
    a = np.concatenate([half, -half, np.full((3, 1), 0.125)], axis=1)
    b = np.concatenate([np.tile(rng.choice([1.0, 2.0, 4.0], (48, 5)), (2, 1)), np.full((1, 5), 1.0)])
    grad_output = np.linspace(-2, 3, 15).reshape(3, 5).astype(dtype.numpy)
    return Case({"a": a.astype(dtype.numpy), "b": b.astype(dtype.numpy)}, grad_output, {"activation": "relu"})


def nowhere_finite(dtype: DType) -> Case:
    """Put NaN and both infinities into separate rows and columns, and infinity against 0 and against its negative."""
    a, b = np.ones((7, 5)), np.ones((5, 6))
    a[1, 2], a[2, 2], a[3, 2], a[4, :2] = np.nan, np.inf, -np.inf, (np.inf, -np.inf)
    b[2, 1], b[2, 2], b[4, 3], b[2, 4] = 0, -1, np.nan, np.inf
    return example(a, b, "leaky_relu")(dtype)


def each_term_in_turn_not_finite(dtype: DType) -> Case:
    """Make one number of most rows of a, and of most columns of b, not finite: each in turn. A few are finite."""
    rng = np.random.default_rng(14)
    a, b = not_finite_in_turn(rng, 9, dtype), values(rng, (9, 5), dtype, "normal")
    a, b = np.concatenate([a, values(rng, (2, 9), dtype, "normal")]), np.concatenate([b, a.T], axis=1)
    grad_output = cotangent(rng, (a.shape[0], b.shape[1]), dtype)
    return Case({"a": a, "b": b}, grad_output, {"activation": "leaky_relu", "negative_slope": 0.01})


examples: Mapping[str, Callable[[DType], Case]] = {
    "one_by_one": example([[3]], [[-2]], "leaky_relu"),
    "no_terms": example(np.zeros((3, 0)), np.zeros((0, 2)), "leaky_relu"),
    "no_rows": example(np.zeros((0, 3)), np.ones((3, 2))),
    "no_columns": example(np.ones((2, 3)), np.zeros((3, 0))),
    "one_row": random_example(1, 37, 40),
    "one_column": random_example(40, 37, 1, "relu"),
    "outer_product": random_example(33, 1, 17),
    "terms_not_a_multiple_of_the_block": random_example(16, 67, 16),
    "extents_past_the_block_by_one": random_example(33, 33, 33, "leaky_relu"),
    "whole_blocks": random_example(64, 64, 32),
    "multiples_of_8": random_example(72, 520, 40, "leaky_relu"),
    "multiples_of_8_transposed": random_example(40, 264, 72, "relu", a="transposed", b="transposed"),
    # More rows of tiles than one group of them has, and columns in both halves of a tile.
    "tiles_in_every_place": random_example(520, 16, 192, "relu"),
    # Of the kernel for Hopper: no copies out of the result, and tiles and terms for several rounds of its buffers.
    "result_rows_apart_by_no_multiple_of_16_bytes": random_example(520, 200, 19, "leaky_relu", b="transposed"),
    "rows_and_columns_past_a_tile_by_one": random_example(129, 8, 513, b="transposed"),
    "terms_past_a_step_by_one": random_example(40, 65, 24, a="transposed"),
    "tall_and_skinny": random_example(300, 3, 2, "relu"),
    "short_and_wide": random_example(2, 3, 300),
    "both_transposed": random_example(19, 21, 23, "relu", a="transposed", b="transposed", grad_output="transposed"),
    "rows_apart_by_no_multiple_of_16_bytes": random_example(9, 24, 16, a="cut_from_wider", b="cut_from_wider"),
    "gaps_of_nan_between_elements": random_example(5, 9, 7, a="sliced_columns", b="sliced_columns"),
    "misaligned": random_example(16, 16, 16, a="misaligned", b="misaligned", grad_output="misaligned"),
    "activation_at_0": example([[1, 1], [0, 0], [-1, 2]], [[1, 0, -1], [-1, 0, 0.5]], "relu"),
    "leaky_activation_at_0": example([[1, 1], [0, 0], [-1, 2]], [[1, 0, -1], [-1, 0, 0.5]], "leaky_relu"),
    "negative_zero": example([[-0.0, 1], [1, -1]], [[1, -1], [-0.0, -1]], "leaky_relu"),
    "slope_of_0": example([[-2, 3]], [[1, -4], [-1, 2]], "leaky_relu", 0.0),
    "slope_above_1": example([[-2, 3]], [[1, -4], [-1, 2]], "leaky_relu", 3.0),
    "not_finite": nowhere_finite,
    "each_term_in_turn_not_finite": each_term_in_turn_not_finite,
    "zero_times_infinity": example([[0, 1], [0, 0]], [[np.inf, 1], [2, -np.inf]]),
    "nan_through_relu": example([[np.nan, 1]], [[1], [2]], "relu"),
    "cancellation": cancellation,
    "sums_past_the_digits_of_a_half_type": sums_past_the_digits_of_a_half_type,
    "subnormal_factors": subnormal_factors,
}


def transpose_result(result: Bounded) -> Bounded:
    """Return the result transposed."""
    return Bounded(result.value.T, result.error.T, result.arithmetic)


def plain(case: Case) -> Case:
    """Return the same product without an activation."""
    return case.with_parameters(activation="none")


def transposing_swaps_the_factors(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """(a b)^T = b^T a^T, and the gradients change places."""
    there = replace(case.with_inputs(a=case["b"].T, b=case["a"].T), grad_output=case.grad_output.T, layouts={})
    here, transposed = evaluate(case), evaluate(there)
    yield Relation(here.output, transpose_result(transposed.output))
    yield Relation(here.gradients["a"], transpose_result(transposed.gradients["b"]))
    yield Relation(here.gradients["b"], transpose_result(transposed.gradients["a"]))


def multiplying_by_the_identity_changes_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """a times the identity is a, in the finite rows. Only the first `MODEST` columns of a are taken."""
    left = case["a"][:, :MODEST]
    a: np.ndarray = left.astype(dtype.wide)
    square = replace(
        plain(case).with_inputs(a=left, b=np.eye(a.shape[1]).astype(dtype.numpy)),
        grad_output=np.zeros(a.shape, dtype=dtype.numpy),
    )
    output = evaluate(square).output
    finite = np.isfinite(a).all(axis=1, keepdims=True)
    yield equal_where(finite, output, Bounded.exact(a, dtype.arithmetic))


def terms_may_be_summed_in_two_parts(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """a b = a[:, :h] b[:h] + a[:, h:] b[h:], where the parts are finite."""
    whole, half = plain(case), (case["a"].shape[1] + 1) // 2
    first = evaluate(whole.with_inputs(a=case["a"][:, :half], b=case["b"][:half])).output
    second = evaluate(whole.with_inputs(a=case["a"][:, half:], b=case["b"][half:])).output
    finite = np.isfinite(first.value) & np.isfinite(second.value)
    yield Relation(only(finite, evaluate(whole).output), only(finite, first) + only(finite, second))


def rows_and_columns_stand_alone(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """A block of the result is the product of its rows of a and its columns of b."""
    (m, _), (_, n) = case["a"].shape, case["b"].shape
    rows, columns = slice(m // 3, m), slice(0, (n + 1) // 2)
    block = replace(
        case.with_inputs(a=case["a"][rows], b=case["b"][:, columns]),
        grad_output=case.grad_output[rows, columns],
        layouts={},
    )
    yield Relation(evaluate(block).output, evaluate(case).output[rows, columns])


def doubling_a_doubles_the_result(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """activation(2a b) = 2 activation(a b), and the gradient of b doubles, where doubling is exact."""
    with np.errstate(over="ignore"):
        doubled = (case["a"].astype(dtype.wide) * 2).astype(dtype.numpy)
    if (np.isfinite(doubled) != np.isfinite(case["a"])).any():
        return
    here, there = evaluate(case), evaluate(case.with_inputs(a=doubled))
    for result, twice in (
        (here.output, there.output),
        (here.gradients["b"], there.gradients["b"]),
    ):
        finite = np.isfinite(result.value) & np.isfinite(twice.value)
        yield Relation(only(finite, twice), only(finite, result) + only(finite, result))
    yield Relation(here.gradients["a"], there.gradients["a"])


def leaky_relu_of_slope_zero_is_relu(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """leaky_relu with slope 0 is relu, where the product is finite: infinity times 0 is NaN."""
    relu = evaluate(case.with_parameters(activation="relu"))
    leaky = evaluate(case.with_parameters(activation="leaky_relu", negative_slope=0.0))
    finite = np.isfinite(evaluate(plain(case)).output.value)
    yield equal_where(finite, leaky.output, relu.output)
    if finite.all():
        yield Relation(leaky.gradients["a"], relu.gradients["a"])


def leaky_relu_of_slope_one_is_no_activation(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """leaky_relu with slope 1 changes neither the product nor its gradients."""
    leaky = evaluate(case.with_parameters(activation="leaky_relu", negative_slope=1.0))
    product = evaluate(plain(case))
    yield Relation(leaky.output, product.output)
    for name in ("a", "b"):
        yield Relation(leaky.gradients[name], product.gradients[name])


ARGUMENTS = arguments_of("matmul")


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads a and b and writes the result. Backward reads them, the cotangent and, if there is an activation,
    the result, and writes two gradients.
    """
    (m, k), (_, n) = case["a"].shape, case["b"].shape
    itemsize = case["a"].dtype.itemsize
    with_result = case.parameters.get("activation", "none") != "none"
    factors, result = (m * k + k * n) * itemsize, m * n * itemsize
    return Cost(factors + result, 2 * m * k * n), Cost(2 * factors + (1 + with_result) * result, 4 * m * k * n)


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {
        "small": whole(random_example(64, 64, 64, "leaky_relu")),
        "ragged": whole(random_example(65, 70, 33, "leaky_relu")),
    },
    "cuda": {
        "small": whole(random_example(256, 256, 256, "leaky_relu")),
        "article": tiled(random_example(64, 4096, 64, "leaky_relu"), 64, "a", across=("b",)),
        "large": tiled(random_example(64, 8192, 64, "leaky_relu"), 128, "a", across=("b",)),
        "medium": tiled(random_example(64, 2048, 64, "leaky_relu"), 32, "a", across=("b",)),
        "ragged": tiled(random_example(65, 1001, 1003, "leaky_relu"), 16, "a"),
        # Rows that begin between two multiples of 16 bytes; few tiles of the result; few rows.
        "misaligned": tiled(random_example(33, 4093, 2049, "leaky_relu"), 128, "a"),
        "few_tiles": tiled(random_example(64, 1024, 64, "leaky_relu"), 16, "a", across=("b",)),
        "wide": tiled(random_example(64, 4096, 512, "leaky_relu"), 8, "a", across=("b",)),
        "few_rows": tiled(random_example(16, 8192, 64, "leaky_relu"), 128, across=("b",)),
    },
}

operation = Operation(
    name="matmul",
    # The bounds assume that TF32 is off, which is torch's default. With TF32 float32 would have another arithmetic.
    forward=functools.partial(oracle.forward, stored=stored),
    backward=functools.partial(oracle.backward, stored=stored),
    differentiable=("a", "b"),
    cases=cases,
    examples=examples,
    smooth=smooth,
    batched={"a": 1},
    laws=(
        transposing_swaps_the_factors,
        multiplying_by_the_identity_changes_nothing,
        terms_may_be_summed_in_two_parts,
        rows_and_columns_stand_alone,
        doubling_a_doubles_the_result,
        leaky_relu_of_slope_zero_is_relu,
        leaky_relu_of_slope_one_is_no_activation,
    ),
    errors=ARGUMENTS.errors,
    cost=cost,
    workloads=workloads,
    axes=ARGUMENTS.axes,
    ranges=ARGUMENTS.ranges,
    sized=Sized(
        {"m": 2, "k": 3, "n": 2},
        lambda sizes: random_example(sizes["m"], sizes["k"], sizes["n"], "leaky_relu"),
        # Kernels compute whole tiles of rows.
        largest=lambda sizes: max(sizes["m"], 64) * sizes["n"],
    ),
    source="Higham, Accuracy and Stability of Numerical Algorithms, section 3.5; leaky_relu: Maas et al., ICML 2013",
)
