"""The record of layer_norm: layer normalization over the last axis."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from fourfold.oracles import layer_norm as oracle
from hypothesis import strategies as st

from fourfold.declaration.library import Declared
from fourfold.inputs.arrays import (
    GENERATORS,
    cotangent,
    values,
)
from fourfold.inputs.special_values import not_finite_in_turn
from fourfold.numerics.bounded import IN_GRADIENTS, Arithmetic, Bounded, scaling_allowance, unspecified_where
from fourfold.numerics.dtypes import DType
from fourfold.numerics.steps.along_axes import total
from fourfold.numerics.steps.orders import any_order
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Relation
from fourfold.operations.relations import equal_where, equals, exactly, only
from fourfold.operations.workloads import Make, tiled, whole

from .norms import (
    ROWS_NOT_FINITE,
    a_row_does_not_see_the_others,
    adding_a_number_to_a_row_changes_nothing,
    columns_may_change_places,
    gradient_of_weight_weighs_the_normalized_rows,
    gradients_of_two_batches_add_up,
    normalized_rows_have_at_most_unit_mean_square,
    plain_cotangent,
    reorder_factors,
    scaling_a_row_scales_the_deviation_alone,
    squares_overflow,
    standard,
    sum_over_rows,
)

LAYER_NORM = Declared("layer_norm")
rows = LAYER_NORM.example


def forward(x: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    """Return the oracle's output; unspecified, for other kernels, where scaling a number overflows."""
    given, x = x, scaling_allowance(x)
    output = oracle.forward(x, weight, bias, eps)
    if x is given:
        return output
    scale = weight, 1 / oracle.normalize(x, eps)[1]
    return any_order(output, (x, *scale), (np.mean(x, axis=-1, keepdims=True), *scale), (bias,))


def backward(grad_output: Any, x: Any, weight: Any, bias: Any, eps: float = 1e-5) -> tuple[Any, Any, Any]:
    """Return the oracle's gradients. The gradient of x is unspecified in a row in which a step might overflow.

    In a row with an infinite product of cotangent and weight, each infinity of that gradient is unspecified, too. It is
    NaN if the means are subtracted in the other order, as in the torch implementation.
    """
    x = scaling_allowance(x, IN_GRADIENTS)
    grad_x, *others = oracle.backward(grad_output, x, weight, bias, eps)
    grad_x = reorder_factors(grad_x, grad_output, weight, x, oracle.normalize(x, eps)[1])
    if isinstance(grad_x, Bounded):
        infinite = np.isinf((grad_output * weight).value).any(axis=-1, keepdims=True)
        grad_x = unspecified_where(grad_x, infinite & np.isinf(grad_x.value))
    return grad_x, *others


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """Draw one to three rows of two to five columns, no row nearly constant."""
    rng = draw(GENERATORS)
    shape = (draw(st.integers(1, 3)), draw(st.integers(2, 5)))
    x = rng.permuted(np.tile(np.arange(shape[1]), (shape[0], 1)), axis=-1) + rng.uniform(0, 0.5, shape)
    inputs = {"x": x.astype(dtype.numpy)}
    inputs |= {name: values(rng, shape[1:], dtype, "normal") for name in ("weight", "bias")}
    return Case(inputs, cotangent(rng, shape, dtype), {"eps": 1e-5})


def normal(mean: float, deviation: float, *shape: int) -> Callable[[np.random.Generator, DType], np.ndarray]:
    """Return a maker of normally distributed numbers."""
    return lambda rng, dtype: rng.normal(mean, deviation, shape)


def large_mean(*shape: int, share: float = 1.0) -> Callable[[np.random.Generator, DType], np.ndarray]:
    """Return a maker of deviations that are as small against the mean as the dtype can hold, or against a share of it.

    The mean of the squares minus the square of the mean loses all their digits, except in bfloat16, whose digits
    float32 still holds.
    """
    offset = {"float64": 1e9, "float32": 1e4, "float16": 2000.0, "bfloat16": 256.0}
    return lambda rng, dtype: np.rint(share * offset[dtype.name]) + rng.choice([-2.0, 0.0, 2.0], shape)


def one_infinity_a_row(rng: np.random.Generator, dtype: DType) -> np.ndarray:
    """Return four rows of a cotangent with an infinity in each, of both signs and in different columns."""
    return np.where(np.eye(4, 17, 5), np.inf, 1) * rng.normal(0, 2, (4, 17))


examples: Mapping[str, Callable[[DType], Case]] = {
    # The variance is 0, and the output the bias.
    "one_column": rows(x=normal(1000, 2, 5, 1)),
    # The size of the number does not matter, because only deviations are squared.
    "one_column_of_huge_numbers": rows(
        x=lambda rng, dtype: np.tile([[dtype.largest / 2], [-dtype.largest / 4]], (4, 1))
    ),
    # Rows at every distance from a multiple of 16 bytes, of several vectors for each thread.
    "rows_that_begin_anywhere": rows(9, cols=1029),
    "two_columns": rows(x=[[0.0, 1.0], [3.0, 3.0], [-4.0, 4.0], [2.0, -1.0]]),
    "large_mean": rows(x=large_mean(6, 72)),
    # The bound on the mean of a long row is wider, and would cover the deviations from a larger mean.
    "large_mean_of_long_rows": rows(x=large_mean(2, 1025, share=0.3)),
    # The mean of the squares minus the square of the mean falls below 0 here, and its root is NaN.
    "constant_rows": rows(x=np.repeat([[0.1], [-3.3], [1000.0], [0.0]], 33, axis=1)),
    "squares_overflow": rows(x=squares_overflow),
    "rows_not_finite": rows(x=ROWS_NOT_FINITE),
    "each_entry_in_turn_not_finite": rows(x=lambda rng, dtype: not_finite_in_turn(rng, 17, dtype)),
    "cotangent_not_finite": rows(4, cols=17, grad_output=one_infinity_a_row),
    "eps_far_above_the_variance": rows(x=normal(0.5, 0.01, 3, 24), eps=0.25),
    "eps_far_below_the_variance": rows(x=normal(0, 1e-4, 3, 24), eps=1e-12),
    # A sum of bfloat16 in bfloat16 stops growing at 256.
    "long_row": rows(x=normal(1, 2, 1, 4096)),
    # As of many_short_rows, more rows than blocks run at a time: each sums the gradients of several, and a second stage
    # what they leave.
    "many_rows_of_whole_vectors": rows(300, cols=16),
    # Rows that fit neither the registers of a warp nor of a block. Those of 33000 columns fit no shared memory either.
    # More of them than a block has room for at once, where they are brought to shared memory ahead.
    "rows_in_stages": rows(11, cols=2056),
    "rows_longer_than_registers": rows(4, cols=10240),
    "four_short_of_16384_columns": rows(2, cols=16380),
    "one_short_of_4096_columns_that_lie_apart": rows(1, cols=4095, x="sliced_columns"),
    "rows_longer_than_registers_along_two_axes": rows(
        2, 2, cols=8200, x="transposed", grad_output="transposed", weight="sliced_columns", bias="sliced_columns"
    ),
    "odd_rows_of_single_columns": rows(20, cols=1027),
    "odd_rows_of_many_single_columns": rows(2, cols=4099),
    # More rows than programs that run at a time, along two axes that no single stride spans.
    "more_rows_than_programs_along_two_axes": rows(4, 3, cols=2049, x="transposed", grad_output="transposed"),
    "rows_longer_than_shared_memory": rows(2, 2, cols=33000, x="transposed", grad_output="transposed"),
    # More columns than the largest number of float16.
    "one_past_65536_columns": rows(1, cols=65537),
    "weight_and_bias_strided": rows(4, cols=48, weight="sliced_columns", bias="sliced_columns"),
    "cotangent_of_a_sum": rows(9, cols=40, grad_output=(-1.5, "expanded")),
    "cotangent_of_a_sum_through_positive_weights": rows(
        3, weight=lambda rng, dtype: abs(rng.normal(0, 2, 2049)), grad_output=(-1.5, "expanded")
    ),
    # One column more than there are in pieces of any size; of float64, to which these are long rows, so many that each
    # program sums over several.
    "one_past_8192_columns_that_lie_apart": lambda dtype: rows(
        2, 13 if dtype.name == "float64" else 1, cols=8193, x="axes_reversed", grad_output="axes_reversed"
    )(dtype),
}


def constant_rows_give_the_bias(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """A constant row has no deviations, and so its output is the bias."""
    x = case["x"]
    if not x.shape[-1]:
        return
    constant = case.with_inputs(x=np.broadcast_to(x[..., :1], x.shape).copy())
    finite = np.isfinite(x[..., :1].astype(np.float64))
    bias: np.ndarray = np.broadcast_to(case["bias"].astype(dtype.wide), x.shape)
    output = evaluate(constant).output
    yield equal_where(finite, output, exactly(bias, output))


def normalized_rows_sum_to_zero(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """With weight 1 and bias 0, the mean of each row is 0."""
    output = evaluate(standard(case)).output
    sums = total(only(np.isfinite(output.value).all(-1, keepdims=True), output), axis=-1)
    yield equals(sums, 0)


def differences_are_in_proportion(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """n_i - n_k = (n_j - n_k) (x_i - x_k) / (x_j - x_k), where n is output / weight, and the bias 0.

    Of each row, x_k is the smallest number and x_j the largest. Mean and deviation are not in it, and so not the error
    of a long sum, below which half of a difference's digits could hide. The weights have all digits, and none is 0.
    """
    x: np.ndarray = case["x"].astype(dtype.wide)
    if x.shape[-1] < 3 or not x.size:
        return
    rng = np.random.default_rng(x.shape[-1])
    weight = (rng.choice([-1, 1], x.shape[-1]) * rng.uniform(0.5, 2, x.shape[-1])).astype(dtype.numpy)
    output = evaluate(case.with_inputs(weight=weight, bias=np.zeros_like(case["bias"]))).output
    weights: np.ndarray = weight.astype(dtype.wide)
    with np.errstate(all="ignore"):
        rows = np.isfinite(x).all(-1, keepdims=True) & np.isfinite(output.value).all(-1, keepdims=True)
        x = np.where(rows, x, 0)
        normal = np.where(rows, output.value, 0) / weights
        least, most = np.argmin(x, -1, keepdims=True), np.argmax(x, -1, keepdims=True)
        (x_k, n_k), (x_j, n_j) = ([np.take_along_axis(of, at, -1) for of in (x, normal)] for at in (least, most))
        scale = (n_j - n_k) / (x_j - x_k)
        rows = rows & (scale > 0) & np.isfinite(scale)
        share = np.where(rows, (x - x_k) / (x_j - x_k), 0)
        errors = _errors_of_normalized(x, normal, scale, output.arithmetic)
        error = errors + (1 - share) * np.take_along_axis(errors, least, -1)
        error += share * np.take_along_axis(errors, most, -1)
        expected = Bounded((n_k + (n_j - n_k) * share) * weights, error * abs(weights), output.arithmetic)
    yield Relation(only(rows, exactly(output.value, output)), only(rows, expected))


# It takes no gradients, and it is about long rows.
differences_are_in_proportion.most_named = 40_000  # type: ignore[attr-defined]


def _errors_of_normalized(x: np.ndarray, normal: np.ndarray, scale: np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
    """Return the error of a right kernel in each normalized number, except the errors of the row's mean and deviation.

    Others may compute x * scale - mean * scale, times the weight or with the weight in each product.
    """
    kept = arithmetic.storage or arithmetic
    step = kept if arithmetic.rounds_each_step else arithmetic
    terms = (abs(x) + abs(x.mean(-1, keepdims=True))) * scale + abs(normal)
    smallest = np.maximum(step.smallest_normal * scale, kept.smallest_normal)
    return 4 * step.roundoff * terms + kept.roundoff * abs(normal) + 4 * smallest


def gradients_of_a_row_sum_to_zero(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradient of a row sums to 0, because adding a number to a row changes nothing."""
    gradient = evaluate(case).gradients["x"]
    # Only finite rows count: gradients of nearly constant rows overflow half types if eps is small.
    sums = total(only(np.isfinite(gradient.value).all(-1, keepdims=True), gradient), axis=-1)
    yield equals(sums, 0)


def gradient_of_bias_is_the_sum_of_cotangents(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradient of bias is the sum of the cotangent over rows, whatever x is."""
    yield Relation(evaluate(case).gradients["bias"], sum_over_rows(plain_cotangent(case, dtype)))


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads x, weight and bias and writes rows. Backward reads x, cotangent and weight and writes gradients."""
    x, parameters = case["x"], case["weight"].nbytes + case["bias"].nbytes
    return Cost(2 * x.nbytes + parameters, 8 * x.size), Cost(3 * x.nbytes + 3 * parameters // 2, 14 * x.size)


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(rows(32, cols=256)), "ragged": whole(rows(17, cols=1001))},
    "cuda": {
        "small": whole(rows(128, cols=256)),
        "large": tiled(rows(256, cols=4096), 128, "x"),
        "shortest_rows": tiled(rows(256, cols=256), 512, "x"),
        "short_rows": tiled(rows(256, cols=1024), 128, "x"),
        "long_rows": tiled(rows(16, cols=16384), 1024, "x"),
        "longest_rows": tiled(rows(16, cols=65536), 256, "x"),
        "ragged": tiled(rows(33, cols=1001), 256, "x"),
        # Rows that begin between two multiples of 16 bytes.
        "misaligned": tiled(rows(32, cols=4099), 1024, "x"),
    },
}

operation = LAYER_NORM.operation(
    oracle,
    forward=forward,
    backward=backward,
    examples=examples,
    smooth=smooth,
    laws=(
        adding_a_number_to_a_row_changes_nothing,
        scaling_a_row_scales_the_deviation_alone,
        constant_rows_give_the_bias,
        columns_may_change_places,
        normalized_rows_sum_to_zero,
        normalized_rows_have_at_most_unit_mean_square,
        differences_are_in_proportion,
        gradients_of_a_row_sum_to_zero,
        gradient_of_bias_is_the_sum_of_cotangents,
        gradient_of_weight_weighs_the_normalized_rows,
        a_row_does_not_see_the_others,
        gradients_of_two_batches_add_up,
    ),
    cost=cost,
    workloads=workloads,
)
