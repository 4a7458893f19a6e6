"""For each NumPy function with a rule, every right evaluation is within the bound, and the bound is not much wider.

Right evaluations are in float32, by NumPy and by torch, with sums and products in random orders. The exact value at
every argument within the operand's error is right, too. Long doubles stand for exact values.
"""

import functools
import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fourfold.numerics.bounded import DOCUMENTED, OPEN, RULES, Bounded, Comparison, NoRule, certain
from fourfold.numerics.dtypes import DTYPES
from fourfold.numerics.steps.elementwise import POWER, REORDERING, WITHIN_1_ULP, WITHIN_2_ULP
from fourfold.numerics.steps.orders import any_order, either_formula

SINGLE = DTYPES["float32"].arithmetic
COUNT = 20_000

pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")

Draw = Callable[[np.random.Generator], np.ndarray]


def exact(*values: float) -> Bounded:
    return Bounded.exact(np.array(values, dtype=np.float64), SINGLE)


def rough(*values: float, error: float = 1e-3) -> Bounded:
    value = np.array(values, dtype=np.float64)
    return Bounded(value, np.full_like(value, error), SINGLE)


def magnitudes(least: float, most: float, signed: bool = False) -> Draw:
    """Draw numbers with uniformly distributed exponents."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        size = np.exp(rng.uniform(np.log(least), np.log(most), COUNT))
        return size * rng.choice([-1, 1], COUNT) if signed else size

    return draw


def beside(center: float, draw: Draw) -> Draw:
    return lambda rng: center + draw(rng)


def powers(exponent: float) -> Callable[[Any], Any]:
    return lambda x: x ** (np.float32(exponent) if x.dtype == np.float32 else exponent)


# Function, arguments, and the allowed error in roundings. The arguments include some near the function's zeros.
ELEMENTARY: dict[str, tuple[Callable[[Any], Any], Draw, float]] = {
    "log": (np.log, magnitudes(1e-35, 1e35), WITHIN_1_ULP),
    "log beside 1": (np.log, beside(1, magnitudes(1e-6, 0.5, signed=True)), WITHIN_1_ULP),
    "log2": (np.log2, magnitudes(1e-35, 1e35), WITHIN_1_ULP),
    "log2 beside 1": (np.log2, beside(1, magnitudes(1e-6, 0.5, signed=True)), WITHIN_1_ULP),
    "log1p": (np.log1p, magnitudes(1e-30, 0.999, signed=True), WITHIN_1_ULP),
    "log1p far": (np.log1p, magnitudes(1, 1e35), WITHIN_1_ULP),
    "exp2": (np.exp2, magnitudes(1e-10, 120, signed=True), WITHIN_2_ULP),
    "expm1": (np.expm1, magnitudes(1e-30, 80, signed=True), WITHIN_1_ULP),
    "tanh": (np.tanh, magnitudes(1e-30, 30, signed=True), WITHIN_2_ULP),
    "arctan": (np.arctan, magnitudes(1e-30, 1e30, signed=True), WITHIN_2_ULP),
    "sin": (np.sin, magnitudes(1e-30, 1e5, signed=True), WITHIN_2_ULP),
    "cos": (np.cos, magnitudes(1e-30, 1e5, signed=True), WITHIN_2_ULP),
    "sqrt": (np.sqrt, magnitudes(1e-37, 1e35), 1),
    "square": (np.square, magnitudes(1e-15, 1e15, signed=True), 1),
    "reciprocal": (np.reciprocal, magnitudes(1e-35, 1e35, signed=True), 4),
    "absolute": (np.absolute, magnitudes(1e-35, 1e35, signed=True), 0),
    "x ** 2": (powers(2), magnitudes(1e-15, 1e15, signed=True), 1),
    "x ** 3": (powers(3), magnitudes(1e-10, 1e10, signed=True), POWER),
    "x ** 4": (powers(4), magnitudes(1e-8, 1e8, signed=True), POWER),
    "x ** 20": (powers(20), magnitudes(0.03, 30, signed=True), 19),
    "x ** -1": (powers(-1), magnitudes(1e-30, 1e30, signed=True), POWER),
    "x ** -3": (powers(-3), magnitudes(1e-10, 1e10, signed=True), POWER),
    "x ** 0.5": (powers(0.5), magnitudes(1e-35, 1e35), POWER),
    "x ** -0.5": (powers(-0.5), magnitudes(1e-35, 1e35), POWER),
    "x ** 2.5": (powers(2.5), magnitudes(1e-12, 1e12), POWER),
    "x ** 0.1": (powers(0.1), magnitudes(1e-35, 1e35), POWER),
}
elementary = pytest.mark.parametrize("name", ELEMENTARY)


def exactly(function: Callable[[Any], Any], x: np.ndarray) -> np.ndarray:
    return function(x.astype(np.longdouble))


@elementary
def test_float32_values_of_elementary_functions_are_within_their_bounds(name: str) -> None:
    function, draw, steps = ELEMENTARY[name]
    x = draw(np.random.default_rng(21)).astype(np.float32)
    bounded = function(Bounded.exact(x.astype(np.float64), SINGLE))
    right = exactly(function, x)
    computed = [function(x)]
    if in_torch := getattr(torch, name.split()[0], None):
        computed.append(in_torch(torch.from_numpy(x)).numpy())
    for values in computed:
        assert values.dtype == np.float32
        assert np.all(abs(values - right) <= bounded.error)
    # Every step may cost a few times the best implementation's error. A rounded exponent costs one more rounding.
    of_exponent = 0.5 * abs(np.log(x.astype(np.float64))) if name == "x ** 0.1" else 0
    allowed = (REORDERING * steps * 1.01 + of_exponent) * SINGLE.roundoff * abs(right) + 2 * SINGLE.smallest_normal
    assert np.all(bounded.error <= allowed)


@elementary
def test_the_error_of_an_argument_goes_through_elementary_functions(name: str) -> None:
    function, draw, steps = ELEMENTARY[name]
    rng = np.random.default_rng(22)
    x = draw(rng).astype(np.float32).astype(np.longdouble)
    # Errors from below the roundoff to twice the argument.
    error = abs(x) * 10.0 ** rng.uniform(-9, 0.3, COUNT)
    bounded = function(Bounded(x, error, SINGLE))
    known = np.isfinite(bounded.error)
    right, worst = function(x), np.zeros(COUNT)
    for side in (-1.0, 1.0, *rng.uniform(-1, 1, 8)):
        # Stay just inside the interval: rounding to long double may move its end outside.
        off = abs(function(x + np.longdouble(side * (1 - 1e-8)) * error) - right)
        assert np.all(off[known] <= bounded.error[known])
        worst = np.maximum(worst, off.astype(np.float64))
    assert np.mean(known) > 0.9
    # If the argument's error dominates the rounding, the bound is little more than its effect.
    own = 2 * REORDERING * steps * SINGLE.roundoff * (abs(right) + worst) + 2 * SINGLE.smallest_normal
    matters = known & (worst > 10 * own)
    assert np.count_nonzero(matters) > COUNT / 20
    ratio = bounded.error[matters] / worst[matters]
    assert np.median(ratio) < 1.2
    assert np.max(ratio) < 3


def test_a_power_may_be_taken_by_as_many_products() -> None:
    x = exact(*np.linspace(1.01, 1.5, 99))
    for exponent in (100, -100):
        relative = (x**exponent).error / (x**exponent).value
        assert np.all(relative >= 99 * SINGLE.roundoff)
        assert np.all(relative <= 110 * REORDERING * SINGLE.roundoff)


def test_waves_and_tanh_never_are_farther_off_than_they_can_be() -> None:
    x = Bounded(np.linspace(-9, 9, 1000), np.full(1000, 1e6), SINGLE)
    for function in (np.sin, np.cos, np.tanh):
        assert np.all(function(x).error < 2 * (1 + 1e-5))
        assert np.all(function(x).error >= 1 + abs(function(x).value))


def test_nothing_is_known_of_a_logarithm_or_root_of_what_may_not_be_positive() -> None:
    for function in (np.log, np.log2, np.sqrt, lambda x: x**0.5, lambda x: x**-0.5, lambda x: x**1.5):
        assert np.isinf(function(rough(1e-4, -1e-4)).error).all()
        assert np.isfinite(function(rough(2e-3)).error).all()
        below = function(rough(-2e-3))
        assert np.isnan(below.value)
        assert below.error == 0
    assert np.isinf(np.log1p(rough(-1 + 1e-4, -1 - 1e-4)).error).all()
    assert np.isfinite(np.log1p(rough(-1 + 2e-3)).error)
    for exponent in (-1, -2, -3):
        assert np.isinf((rough(1e-4, -1e-4) ** exponent).error).all()
        assert np.isfinite((rough(2e-3, -2e-3) ** exponent).error).all()


def test_a_subnormal_number_may_be_taken_for_zero() -> None:
    # Triton's sqrt.approx.ftz and libdevice's functions do this.
    small = exact(1e-39)
    assert np.sqrt(small).error >= np.sqrt(small).value
    assert (small**0.5).error >= (small**0.5).value
    assert np.isinf((1.0 / np.sqrt(small)).error)
    assert np.isinf(np.log(small).error)
    assert np.isinf((small**-0.5).error)
    normal = exact(SINGLE.smallest_normal)
    for function in (np.sqrt, np.log, powers(0.5), powers(-0.5)):
        assert function(normal).error < 1e-4 * abs(function(normal).value)


def test_a_limit_is_kept_where_the_sign_of_a_result_is_known() -> None:
    nearly = rough(1e-4, 2e-4)
    for never_negative in (np.square(nearly), abs(nearly), nearly**2, np.maximum(nearly, 0.0), np.var(nearly)):
        assert np.all(never_negative.least >= 0)
        # So the root of its sum with a tiny constant is known to be positive, and may be a divisor.
        assert np.all(np.isfinite((1.0 / np.sqrt(never_negative + 1e-6)).error))
        assert np.all((never_negative + 1e-6).least >= 0.99e-6)
        assert np.all(np.isfinite((1.0 / np.sqrt(np.mean(never_negative) + 1e-6)).error))
    assert np.isinf(np.sqrt(nearly + 1e-6).error).all()
    assert np.all(np.square(rough(5.0)).least > 24)


def test_a_limit_goes_where_the_elements_go_and_gives_way_to_what_is_written() -> None:
    clamped = np.maximum(rough(-1.0, 1e-4, 5.0), 0.0)
    assert np.all(clamped[1:].least >= 0)
    assert np.all(clamped.reshape(3, 1).least >= 0)
    clamped[1] = rough(-7.0)[0]
    assert clamped.least.tolist()[1] < -7
    assert clamped[0:1].least >= 0


def test_what_was_made_of_a_number_does_not_change_with_it() -> None:
    x = exact(0.5, 2.0)
    product = x * exact(3.0, 3.0)
    x[0] = rough(0.1)[0]
    # The product was exact, but its operand changed afterwards, so this is no longer known.
    assert (product >= product.value).uncertain.all()


@pytest.mark.parametrize("exponents", [(0.5, 2.0, -1.0), (3.0, -2.5, 1.0)])
def test_exponents_may_be_arrays_and_rough(exponents: tuple[float, ...]) -> None:
    rng = np.random.default_rng(23)
    base = Bounded(rng.uniform(0.5, 9, (50, 1)), rng.uniform(0, 0.1, (50, 1)), SINGLE)
    exponent = Bounded(np.array(exponents), rng.uniform(0, 0.1, 3), SINGLE)
    bounded = base**exponent
    for sides in itertools.product((-1, -0.3, 1), repeat=2):
        x, p = base.value + sides[0] * base.error, exponent.value + sides[1] * exponent.error
        assert np.all(abs(x**p - bounded.value) <= bounded.error)
    assert np.all(np.isfinite(bounded.error))
    powers_of_two = 2.0 ** rough(1.0, -3.0)
    assert np.all(abs(2 ** np.array([1.001, -2.999]) - powers_of_two.value) <= powers_of_two.error)


# Sums and products.


def combined(rng: np.random.Generator, values: np.ndarray, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine values to one in a random order: any two at a time, all neighbours, or one after another."""
    rest = list(rng.permutation(values))
    order = rng.choice(["any", "neighbours", "sequence"])
    while len(rest) > 1:
        if order == "neighbours":
            pairs = [rest[i : i + 2] for i in range(0, len(rest), 2)]
            rest = [combine(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        else:
            at = int(rng.integers(len(rest) - 1)) if order == "any" else 0
            rest[at : at + 2] = [combine(rest[at], rest[at + 1])]
    return rest[0]


def a_sum(rng: np.random.Generator, x: np.ndarray) -> np.float32:
    return combined(rng, x, np.add)


def a_mean(rng: np.random.Generator, x: np.ndarray) -> np.float32:
    count = np.float32(len(x))
    return a_sum(rng, x) / count if rng.random() < 0.5 else a_sum(rng, x * (np.float32(1) / count))


def a_product(rng: np.random.Generator, x: np.ndarray) -> np.float32:
    return combined(rng, x, np.multiply)


def two_pass(rng: np.random.Generator, x: np.ndarray) -> np.float32:
    centred = x - a_mean(rng, x)
    return a_mean(rng, centred * centred)


def merged(rng: np.random.Generator, x: np.ndarray) -> np.float32:
    """Compute by Chan, Golub and LeVeque's merges of count, mean and squares; one by one they are Welford's updates."""
    one = np.float32(1)

    def merge(a: tuple[Any, Any, Any], b: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        count, delta = a[0] + b[0], b[1] - a[1]
        return count, a[1] + delta * (b[0] / count), a[2] + b[2] + delta * delta * (a[0] * b[0] / count)

    moments = np.empty(len(x), dtype=object)
    moments[:] = [(one, value, np.float32(0)) for value in x]
    count, _, squares = combined(rng, moments, merge)
    return squares / count


def deviation(rng: np.random.Generator, x: np.ndarray) -> np.float32:
    return np.sqrt(two_pass(rng, x) if rng.random() < 0.5 else merged(rng, x))


# Function, its right evaluation, whether all terms are near 1, and the largest ratio of the bound to the worst error.
REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool, float]] = {
    "sum": (np.sum, a_sum, False, 60),
    "add.reduce": (np.add.reduce, a_sum, False, 60),
    "mean": (np.mean, a_mean, False, 60),
    "prod": (np.prod, a_product, True, 60),
    "two-pass var": (np.var, two_pass, False, 90),
    "merged var": (np.var, merged, False, 90),
    "std": (np.std, deviation, False, 90),
    "last of cumsum": (lambda x: np.cumsum(x)[-1], a_sum, False, 60),
    "last of add.accumulate": (lambda x: np.add.accumulate(x)[-1], a_sum, False, 60),
}


@pytest.mark.parametrize("error", [0.0, 1e-5])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_no_order_of_a_sum_or_product_leaves_its_bound(name: str, error: float) -> None:
    function, evaluate, near_one, most = REDUCTIONS[name]
    rng = np.random.default_rng(24)
    ratios = []
    for _ in range(60):
        count = int(rng.integers(2, 50))
        size = rng.uniform(0.3, 3, count) if near_one else 10.0 ** rng.uniform(-3, 3, count)
        x = np.float32(size * rng.choice([-1, 1], count) + (0 if near_one else rng.choice([0, 100]))).astype(np.float64)
        bounded = function(Bounded(x, error * abs(x), SINGLE))
        right = function(x.astype(np.longdouble))
        assert abs(right - bounded.value) <= 1e-12 * abs(right)
        worst = 0.0
        for _ in range(8):
            # A computed operand that is off by at most its error.
            moved = np.float32(x + error * abs(x) * rng.uniform(-0.99, 0.99, count))
            off = abs(float(evaluate(rng, moved)) - bounded.value)
            assert off <= bounded.error
            worst = max(worst, float(off))
        ratios.append(float(bounded.error) / max(worst, 1e-30))
    assert np.median(ratios) < most


def test_all_partial_sums_are_bounded_by_their_own_terms() -> None:
    rng = np.random.default_rng(25)
    x = rng.normal(0, 1, (3, 200)).astype(np.float32)
    bounded = np.cumsum(Bounded.exact(x.astype(np.float64), SINGLE), axis=1)
    assert np.all(abs(np.cumsum(x, axis=1) - bounded.value) <= bounded.error)
    last_first = np.cumsum(x[:, ::-1], axis=1)[:, ::-1]
    from_the_end = np.cumsum(Bounded.exact(x.astype(np.float64), SINGLE)[:, ::-1], axis=1)[:, ::-1]
    assert np.all(abs(last_first - from_the_end.value) <= from_the_end.error)
    assert np.all(bounded.error[:, 0] <= 2 * SINGLE.smallest_normal)
    assert np.all(np.diff(bounded.error) > 0)
    assert np.isinf(np.cumsum(exact(3e38, 3e38, -3e38)).error[1:]).all()
    assert np.array_equal(np.cumsum(exact(1, 2)[None, :]).value, [1, 3])


def test_a_product_that_may_leave_the_range_on_its_way_is_not_known_to_be_exact() -> None:
    far = exact(1e30, 1e30, 1e-30, 1e-30)
    assert np.isinf(np.prod(far).error)
    low = exact(1e30, 1e-30, 1e-30)
    from_the_end = np.float32(1e-30) * np.float32(1e-30) * np.float32(1e30)
    assert from_the_end == 0
    assert abs(from_the_end - np.prod(low).value) <= np.prod(low).error < np.inf
    assert np.prod(exact(0.0, 3.7, 5.1)).error == 0
    assert np.isinf(np.prod(np.stack([exact(np.inf), rough(1e-4)])).error)
    assert np.isnan(np.prod(exact(np.inf, 0.0)).value)
    assert np.prod(exact(np.inf, 0.0)).error == 0


SHAPES = [
    ((7,), (7,)),
    ((5, 7), (7,)),
    ((7,), (7, 3)),
    ((4, 5, 7), (7, 3)),
    ((2, 1, 5, 7), (4, 7, 3)),
    ((4, 5, 7), (7,)),
]


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_products_of_matrices_have_the_bounds_of_their_rows_and_columns(left: tuple, right: tuple) -> None:
    rng = np.random.default_rng(26)
    a, b = (np.float32(rng.normal(0, 1, shape)) for shape in (left, right))
    bounded = np.matmul(
        Bounded(a.astype(np.float64), 1e-4 * abs(a), SINGLE), Bounded.exact(b.astype(np.float64), SINGLE)
    )
    assert bounded.shape == np.matmul(a, b).shape == bounded.error.shape
    for _ in range(20):
        moved = a * np.float32(1 + rng.uniform(-0.9e-4, 0.9e-4, left))
        order = rng.permutation(7)
        computed = np.matmul(moved[..., order], b[order] if b.ndim == 1 else b[..., order, :])
        assert np.all(abs(computed - bounded.value) <= bounded.error)
    assert np.all(bounded.error <= 2e-4 * np.matmul(abs(a), abs(b)))
    if b.ndim <= 2:
        by_dot = np.dot(
            Bounded(a.astype(np.float64), 1e-4 * abs(a), SINGLE), Bounded.exact(b.astype(np.float64), SINGLE)
        )
        assert np.array_equal(by_dot.value, bounded.value)
        assert np.array_equal(by_dot.error, bounded.error)


def test_each_matrix_of_a_batch_has_its_own_bound() -> None:
    rng = np.random.default_rng(27)
    a, b = rng.normal(0, 1, (3, 4, 5)), rng.normal(0, 1, (3, 5, 2))
    a[1, 2, 3], b[2, 0, 1] = np.inf, np.nan
    error = np.zeros_like(a)
    error[0, 1, 2] = np.inf
    batch = Bounded(a, error, SINGLE) @ Bounded.exact(b, SINGLE)
    for i in range(3):
        alone = Bounded(a[i], error[i], SINGLE) @ Bounded.exact(b[i], SINGLE)
        assert np.array_equal(batch.value[i], alone.value, equal_nan=True)
        assert np.array_equal(batch.error[i], alone.error)


def test_dot_with_a_number_is_a_product() -> None:
    assert np.dot(rough(2.0), 3.0).error.tolist() == np.multiply(rough(2.0), 3.0).error.tolist()
    with pytest.raises(NoRule, match="matmul"):
        np.dot(exact(1.0, 2.0), np.ones((3, 2, 4)))


# Extremes and choices.


def test_an_extreme_lies_between_those_of_both_ends() -> None:
    x = Bounded(np.array([[1.0, 5.0], [7.0, -3.0]]), np.array([[0.125, 0.25], [0.5, 0.75]]), SINGLE)
    for function, right, error in [
        (np.max, 7.0, 0.5),
        (np.amax, 7.0, 0.5),
        (np.min, -3.0, 0.75),
        (np.amin, -3.0, 0.75),
    ]:
        assert function(x).value == right
        assert function(x).error == error
    assert np.max(x, axis=1).error.tolist() == [0.25, 0.5]
    assert np.min(x, axis=0, keepdims=True).error.tolist() == [[0.125, 0.75]]
    near = Bounded(np.array([5.0, 4.5]), np.array([0.25, 2.0]), SINGLE)
    assert np.max(near).error == 1.5
    assert np.maximum.reduce(x).value.tolist() == [7, 5]
    assert np.minimum.reduce(x, axis=1).value.tolist() == [1, -3]
    assert np.min(x, initial=-9.0).value == -9
    assert np.max(x[:0], initial=2.0).value == 2
    assert np.max(x, initial=0.1).error == 0.5
    assert np.max(exact(0.0), initial=0.1).error >= abs(float(np.float32(0.1)) - 0.1) > 0
    with pytest.raises(ValueError, match="zero-size"):
        np.max(x[:0])


def test_clip_is_a_maximum_and_a_minimum() -> None:
    x = rough(-3.0, -1.0, 0.5, 2.9999, 7.0)
    for clipped in (np.clip(x, -1.0, 3.0), x.clip(-1.0, 3.0), x.clip(min=-1.0, max=3.0)):
        assert clipped.value.tolist() == np.clip(x.value, -1, 3).tolist()
        assert clipped.error.tolist() == [0, 1e-3, 1e-3, 1e-3, 0]
    assert np.clip(x, 0.0, None).value.tolist() == [0, 0, 0.5, 2.9999, 7]
    assert x.clip(max=0.0).value.tolist() == [-3, -1, 0, 0, 0]
    assert np.clip(np.ones(5), x, 9.0).error.tolist() == [0, 0, 0, 1e-3, 1e-3]


def test_a_sign_is_known_where_that_of_the_number_is() -> None:
    signs = np.sign(Bounded(np.array([2.0, -2.0, 0.0, 1.0, 0.0, np.nan]), np.array([1.0, 1, 0, 2, 2, 0]), SINGLE))
    assert signs.value.tolist()[:5] == [1, -1, 0, 1, 0]
    assert signs.error.tolist() == [0, 0, 0, 2, 1, 0]
    assert np.isinf(np.sign(exact(1e30) * 1e30).error)


def test_the_place_of_an_extreme_is_given_only_where_it_is_certain() -> None:
    x = Bounded(np.array([[1.0, 5.0, 2.0], [7.0, 7.0, 3.0]]), np.array([[0.1, 0.1, 0.1], [0, 0, 0.1]]), SINGLE)
    assert np.argmax(x, axis=1).tolist() == [1, 0]
    assert np.argmax(x, axis=1, keepdims=True).tolist() == [[1], [0]]
    assert x.argmin(axis=0).tolist() == [0, 0, 0]
    assert np.argmax(x) == 3
    assert np.argmax(exact(1.0, np.nan, np.inf)) == 1
    beside = Bounded(np.array([1.0, 1.05]), np.array([0.1, 0.0]), SINGLE)
    for uncertain in (beside, Bounded(np.array([1.0, 5.0]), np.array([np.inf, 0]), SINGLE), exact(1e30) * 1e30):
        for find in (np.argmax, np.argmin):
            with pytest.raises(ValueError, match="rounding"):
                find(uncertain)


# Comparisons and functions of their results.

TRUE, FALSE = exact(1.0) > 0.0, exact(-1.0) > 0.0
MAYBE, MAYBE_NOT = rough(1e-4) > 0.0, rough(-1e-4) > 0.0


def possible(*comparisons: Comparison) -> list[set[bool]]:
    return [{bool(c.outcome[0]), bool(c.outcome[0] ^ c.uncertain[0])} for c in comparisons]


@pytest.mark.parametrize("pair", itertools.product((TRUE, FALSE, MAYBE, MAYBE_NOT), repeat=2))
def test_what_is_made_of_comparisons_is_as_certain_as_can_be(pair: tuple[Comparison, Comparison]) -> None:
    a, b = pair
    for combine in (np.logical_and, np.logical_or, np.logical_xor, np.bitwise_and, np.bitwise_or, np.bitwise_xor):
        outcomes = {bool(combine(x, y)) for x, y in itertools.product(*possible(a, b))}
        result = combine(a, b)
        assert result.outcome[0] == combine(a.outcome, b.outcome)[0]
        assert possible(result) == [outcomes]
    assert possible(~a) == [{not x for x in possible(a)[0]}]
    assert possible(a & b, a | b) == possible(np.logical_and(a, b), np.logical_or(a, b))
    both = np.concatenate([a, b])
    assert {bool(np.any(both).outcome), bool(np.any(both).outcome ^ np.any(both).uncertain)} == possible(a | b)[0]
    assert {bool(np.all(both).outcome), bool(np.all(both).outcome ^ np.all(both).uncertain)} == possible(a & b)[0]


def test_comparisons_meet_plain_arrays_and_have_axes() -> None:
    x = exact(1.0, -2.0, 3.0)
    mask = np.array([True, True, False])
    for combined_ in ((x > 0.0) & mask, mask & (x > 0.0), np.logical_and(mask, x)[:1]):
        assert isinstance(combined_, Comparison)
        assert combined_.outcome.tolist() in ([True, False, False], [True])
    square = x[:, None] > x[None, :]
    assert np.any(square, axis=1).outcome.tolist() == [True, False, True]
    assert square.all(axis=1, keepdims=True).shape == (3, 1)
    assert np.count_nonzero(square, axis=1).tolist() == [1, 0, 2]
    assert square.sum() == 3
    assert square[:, None].T.shape == (3, 1, 3)
    assert np.expand_dims(x > 0.0, -1).shape == (3, 1)


def test_not_equal_is_certain_where_equal_is() -> None:
    x = Bounded(np.array([1.0, 1.0, 1.0, np.nan]), np.array([0, 0.1, 0.1, 0]), SINGLE)
    differs = x != np.array([1.0, 1.05, 3.0, 1.0])
    assert differs.outcome.tolist() == [False, True, True, True]
    assert differs.uncertain.tolist() == [False, True, False, False]


def test_the_class_of_a_number_is_certain_unless_nothing_is_known() -> None:
    x = Bounded(np.array([1.0, np.nan, np.inf, 1.0]), np.array([0.5, 0, 0, np.inf]), SINGLE)
    for test in (np.isnan, np.isinf, np.isfinite):
        assert test(x).outcome.tolist() == test(x.value).tolist()
        assert test(x).uncertain.tolist() == [False, False, False, True]


def test_a_comparison_counts_as_one_and_zero_in_a_product() -> None:
    x, gradient = rough(-1.0, 1e-4, 2.0), exact(5.0, 6.0, 7.0)
    for masked in (gradient * (x > 0.0), (x > 0.0) * gradient, gradient * (x > 0.0).astype(x.dtype)):
        assert masked.value.tolist() == [0, 6, 7]
        assert masked.error[0] == 0
        assert 6 <= masked.error[1] < 6.001
        assert masked.error[2] < 1e-5
    assert (exact(1.0, -1.0) > 0.0).astype(np.int64).tolist() == [1, 0]
    with pytest.raises(ValueError, match="rounding"):
        (x > 0.0).astype(np.int64)


def test_an_if_goes_by_a_certain_comparison_of_one_element() -> None:
    x = rough(-1.0, 1e-4, 2.0)
    assert x[2] > 0
    assert not x[0] > 0
    assert x[2:] > 0
    assert bool(exact(3.0))
    assert not exact(0.0)
    assert max(x[0], x[2]).value == 2
    with pytest.raises(ValueError, match="rounding"):
        bool(x[1] > 0)
    with pytest.raises(ValueError, match="rounding"):
        bool(x[1])
    for several in (x, x > 0.0, x[:0] > 0.0):
        with pytest.raises(ValueError, match="neither true nor false"):
            bool(several)


# Functions that move elements.

MOVES: dict[Any, Callable[[Any], Any]] = {
    np.broadcast_to: lambda x: np.broadcast_to(x, (4, 2, 3, 1)),
    np.copy: np.copy,
    np.diagonal: np.diagonal,
    np.expand_dims: lambda x: np.expand_dims(x, (0, -1)),
    np.flip: lambda x: np.flip(x, axis=1),
    np.matrix_transpose: np.matrix_transpose,
    np.moveaxis: lambda x: np.moveaxis(x, 0, -1),
    np.ravel: np.ravel,
    np.repeat: lambda x: np.repeat(x, 2, axis=1),
    np.reshape: lambda x: np.reshape(x, (3, -1)),
    np.roll: lambda x: np.roll(x, 1, axis=1),
    np.squeeze: lambda x: np.squeeze(x, axis=-1),
    np.swapaxes: lambda x: np.swapaxes(x, 0, 1),
    np.take: lambda x: np.take(x, [2, 0], axis=1),
    np.take_along_axis: lambda x: np.take_along_axis(x, np.array([[[2]], [[0]]]), axis=1),
    np.tile: lambda x: np.tile(x, (2, 1, 1)),
    np.transpose: lambda x: np.transpose(x, (1, 2, 0)),
    np.tril: lambda x: np.tril(x[..., 0], k=-1),
    np.triu: lambda x: np.triu(x[..., 0]),
    np.stack: lambda x: np.stack([x, x], axis=1),
    np.concatenate: lambda x: np.concatenate([x, x[:1]], axis=0),
    "T": lambda x: x.T,
    "transpose": lambda x: x.transpose(2, 0, 1),
    "reshape": lambda x: x.reshape(-1, 2),
    "swapaxes": lambda x: x.swapaxes(0, 2),
    "repeat": lambda x: x.repeat(3),
    "take": lambda x: x.take([1, 1], axis=0),
    "index": lambda x: x[..., 1:, 0],
    "rows": lambda x: [*x][1],
}


@pytest.mark.parametrize("move", MOVES.values(), ids=[getattr(key, "__name__", key) for key in MOVES])
def test_elements_keep_their_errors_wherever_they_go(move: Callable[[Any], Any]) -> None:
    value = np.arange(6.0).reshape(2, 3, 1)
    moved = move(Bounded(value, value / 8, SINGLE))
    assert np.array_equal(moved.value, move(value))
    assert np.array_equal(moved.error, move(value) / 8)
    compared = move(Bounded(value, value / 8, SINGLE) > 2.0)
    assert isinstance(compared, Comparison)
    assert np.array_equal(compared.outcome, move(value > 2.0))
    assert np.array_equal(compared.uncertain, move(value == 2.0))


def test_every_rule_that_moves_elements_is_tried() -> None:
    moves = {f for f, rule in RULES.items() if rule.compute.__qualname__.startswith("moving.")}
    assert moves
    assert moves <= set(MOVES)


def test_arrays_are_made_like_others() -> None:
    x = rough(1.0, 2.0)
    assert np.zeros_like(x).error.tolist() == np.ones_like(x).error.tolist() == [0, 0]
    assert np.ones_like(x, shape=(3, 1)).value.tolist() == [[1]] * 3
    assert np.full_like(x, 0.5).error.tolist() == [0, 0]
    tenths = np.full_like(x, 0.1)
    assert np.all(abs(float(np.float32(0.1)) - 0.1) <= tenths.error)
    tenths[0] = 7
    tenths[1:] = x[:1]
    assert tenths.value.tolist() == [7, 1]
    assert tenths.error.tolist() == [0, 1e-3]
    # An element of np.empty that is never written has an infinite error.
    assert np.isinf(np.empty_like(x).error).all()
    assert (np.shape(x), np.ndim(x), np.size(x), x.shape, x.ndim, x.size) == ((2,), 1, 2) * 2


def test_constants_of_every_kind_are_lifted() -> None:
    for constant in (2, 2.0, True, np.float32(2), np.float64(2), np.array([2]), np.array([2], dtype=np.float16), [2.0]):
        product = exact(3.0) * constant
        assert product.value.tolist() == [3 if constant is True else 6]
        assert product.dtype == np.float64
    assert (exact(1.0) * 10**30).value == 1e30
    assert np.signbit((exact(1.0) * 0.0).value[0]) != np.signbit((exact(1.0) * -0.0).value[0])
    in_double = Bounded.exact(np.ones(1, np.longdouble), DTYPES["float64"].arithmetic)
    assert (in_double * (1 / 3)).dtype == np.longdouble


def test_copies_are_of_their_own() -> None:
    x = rough(1.0, 2.0)
    for copied in (x.copy(), x.astype(np.float64), x.astype(x.dtype), np.copy(x), +x, -x, abs(x), np.maximum(x, 0.0)):
        copied[0] = 5
        assert copied.error.tolist() == [0, 1e-3]
    assert x.value.tolist() == [1, 2]
    assert x.error.tolist() == [1e-3, 1e-3]


# Oracles as a new user may write them.


def rms_norm(x: Any, weight: Any) -> Any:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight


def plain_layer_norm(x: Any, weight: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / (x.var(-1, keepdims=True) + 1e-5) ** 0.5 * weight


def gelu(x: Any, weight: Any) -> Any:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) * weight


def swiglu(x: Any, weight: Any) -> Any:
    left, right = x[..., ::2], x[..., 1::2]
    return left / (1 + np.exp(-left)) * right * weight[::2]


def cross_entropy(x: Any, weight: Any) -> Any:
    shifted = x - np.max(x, axis=-1, keepdims=True)
    terms = np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True)) - shifted
    return np.take_along_axis(terms, np.arange(len(x))[:, None] % x.shape[-1], axis=-1).mean()


def huber(x: Any, weight: Any) -> Any:
    size = np.abs(x)
    return np.where((size < 1.0) | ~(size > 0.5), 0.5 * np.square(x), size - 0.5).sum(axis=0)


def rotated(x: Any, weight: Any) -> Any:
    low, high = x[:, : x.shape[-1] // 2], x[:, x.shape[-1] // 2 :]
    place = np.arange(len(x))[:, None].astype(x.dtype)
    angle = place * np.exp2(np.ones_like(low) * -np.arange(low.shape[-1]).astype(x.dtype))
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def attention(x: Any, weight: Any) -> Any:
    heads = np.moveaxis(x.reshape(len(x), 2, -1), 1, 0)
    scores = heads @ np.swapaxes(heads, -1, -2) * heads.shape[-1] ** -0.5
    scores = np.where(np.tril(np.ones_like(scores)) > 0, scores, -np.inf)
    terms = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = terms / terms.sum(axis=-1, keepdims=True) @ heads
    return np.moveaxis(mixed, 0, 1).reshape(x.shape)


def normalized_rows(x: Any, weight: Any) -> Any:
    return np.clip(x * weight, -2, 2) * np.reciprocal(np.maximum(np.sum(np.square(x), -1, keepdims=True) ** 0.5, 1e-12))


def softplus(x: Any, weight: Any) -> Any:
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0.0) + np.sign(x) * np.log2(1 + np.exp2(-np.abs(x)))


ORACLES = (
    rms_norm,
    plain_layer_norm,
    gelu,
    swiglu,
    cross_entropy,
    huber,
    rotated,
    attention,
    normalized_rows,
    softplus,
)


@pytest.mark.parametrize("oracle", ORACLES)
def test_oracles_as_strangers_write_them_have_bounds_that_float32_keeps(oracle: Callable[[Any, Any], Any]) -> None:
    rng = np.random.default_rng(28)
    worst = 0.0
    for scale in (0.1, 1.0, 3.0):
        x, weight = np.float32(rng.normal(0, scale, (9, 12))), np.float32(rng.normal(0, 1, 12))
        bounded = oracle(*(Bounded.exact(given.astype(np.float64), SINGLE) for given in (x, weight)))
        computed = oracle(x, weight)
        assert computed.dtype == np.float32
        assert computed.shape == bounded.shape
        assert np.isfinite(bounded.error).all()
        off = abs(computed - bounded.value)
        assert np.all(off <= bounded.error)
        worst = max(worst, float(np.max(off / bounded.error)))
        # An evaluation in float16 is outside the bound.
        half = oracle(x.astype(np.float16), weight.astype(np.float16)).astype(np.float64)
        assert np.mean(abs(half - bounded.value) > bounded.error) > 0.5
    assert worst > 0.003


# Functions without a rule.


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (np.rint, "numpy.rint has no"),
        (lambda x: x // 2.0, "numpy.floor_divide has no"),
        (lambda x: x % 2.0, "numpy.remainder has no"),
        (np.sort, "numpy.sort has no"),
        (np.linalg.norm, "numpy.linalg.norm has no"),
        (lambda x: np.einsum("i->", x), "numpy.einsum has no"),
        (lambda x: np.multiply.outer(x, x), "numpy.multiply.outer has no"),
        (lambda x: np.multiply.reduce(x), "numpy.multiply.reduce has no"),
        (lambda x: np.add(x, x, out=np.zeros(2)), "numpy.add has no running-error rule for its argument out"),
        (lambda x: np.add(x, 1.0, where=np.array([True, False])), "numpy.add has no .* for its argument where"),
        (lambda x: np.add(np.zeros(2), x, dtype=np.float32), "numpy.add has no .* for its argument dtype"),
        (lambda x: np.sum(x, dtype=np.float32), "numpy.sum has no .* for its argument dtype"),
        (lambda x: np.sum(x, 0, np.float32), "numpy.sum has no .* for 3 arguments"),
        (lambda x: np.sum(x, initial=1.0), "numpy.sum has no .* for its argument initial"),
        (lambda x: np.add.reduce(x, where=np.array([True, False])), "numpy.add.reduce has no .* argument where"),
        (lambda x: np.mean(x, where=np.array([True, False])), "numpy.mean has no .* for its argument where"),
        (lambda x: np.take(x, [0], out=np.zeros(1)), "numpy.take has no .* for its argument out"),
        (lambda x: np.repeat(np.ones(2), x), "drop its error"),
        (lambda x: np.take_along_axis(np.ones(2), x, 0), "numpy.take_along_axis has no .* where only another"),
        (lambda x: np.where(x > 1.0), "numpy.where has no .* for 1 arguments"),
        (lambda x: np.zeros_like(x, dtype=np.float32), "numpy.zeros_like has no .* for its argument dtype"),
        (lambda x: x.__iadd__(1.0), re.escape("numpy.add has no running-error rule for its argument out (write x = x")),
        (lambda x: np.copyto(x, 1.0), "numpy.copyto has no"),
        (lambda x: x.astype(np.float16), "float16"),
        (lambda x: x.astype(int), "int64"),
        (lambda x: float(x[0]), "drop its error"),
        (lambda x: int(x[0]), "drop its error"),
        (lambda x: [1, 2][x[0]], "drop its error"),
        (lambda x: np.asarray(x), "drop its error"),
        (lambda x: np.array([x, x]), "drop its error"),
        (lambda x: np.zeros(2).__setitem__(slice(None), x), "numpy.zeros_like"),
        (lambda x: float(x[0] > 1.0), "drop its error"),
    ],
)
def test_what_has_no_rule_says_so_and_never_drops_the_error(call: Callable, named: str) -> None:
    with pytest.raises(NoRule, match=named) as raised:
        call(exact(1.0, 2.0))
    assert "\n" not in str(raised.value)


def test_the_error_says_where_a_rule_is_added_and_which_there_are() -> None:
    with pytest.raises(NoRule) as raised:
        np.cbrt(exact(1.0))
    for said in (
        "numpy.cbrt",
        "numerics/steps/elementwise.py",
        "numerics/steps/along_axes.py",
        " exp,",
        " add.reduce,",
        " where",
    ):
        assert said in str(raised.value)


def test_attributes_of_arrays_that_are_missing_are_told_with_those_that_are_there() -> None:
    for array in (exact(1.0), exact(1.0) > 0.0):
        with pytest.raises(AttributeError, match=r"no attribute argsort; of those of numpy.ndarray it has T, .*, sum"):
            array.argsort()
        with pytest.raises(AttributeError, match=r"no attribute nonsense$"):
            _ = array.nonsense


def test_an_index_that_hangs_on_rounding_is_refused_in_any_place() -> None:
    x = Bounded(np.ones((2, 2)), np.full((2, 2), 0.1), SINGLE)
    assert x[x[:, 0] > 0.0, 1].shape == (2,)
    with pytest.raises(ValueError, match="rounding"):
        x[x[:, 0] > 1.0, 1]
    with pytest.raises(ValueError, match="rounding"):
        certain(x > 1.0)


@pytest.mark.parametrize("function", RULES, ids=lambda function: getattr(function, "__name__", None) or function[1])
def test_every_rule_takes_its_arguments_in_numpys_order(function: Any) -> None:
    if isinstance(function, tuple | np.ufunc):
        return
    try:
        theirs = list(inspect.signature(function).parameters)
    except ValueError:
        pytest.skip("this version of NumPy does not tell")
    ours = inspect.signature(RULES[function].compute).parameters.values()
    by_position = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    if function not in MOVES or function in (np.stack, np.concatenate):
        assert by_position[1:] == theirs[1 : len(by_position)]
        assert {p.name for p in ours} - {by_position[0]} <= set(theirs) or "kwargs" in theirs


# Products in any order.


def test_every_order_of_the_factors_of_a_product_is_within_its_bound() -> None:
    rng, left_range = np.random.default_rng(5), 0
    for _ in range(200):
        factors = (rng.normal(size=4) * 10.0 ** rng.uniform(-25, 25, 4)).astype(np.float32)
        given = [Bounded.exact(np.asarray(factor, np.float64), SINGLE) for factor in factors]
        first, *others = given
        result = any_order(functools.reduce(np.multiply, others, first), given)
        with np.errstate(all="ignore"):
            found = [functools.reduce(np.multiply, order) for order in itertools.permutations(factors)]
        exact = np.prod(factors.astype(np.float64))
        within = abs(np.array(found, np.float64) - exact) <= result.error
        assert within.all() or np.isinf(result.error)
        left_range += not np.isfinite(found).all() or min(map(abs, found)) == 0
    assert left_range > 20


def test_an_ordinary_product_in_any_order_has_the_bound_of_its_steps() -> None:
    a, b = exact(3.0, 0.0), exact(0.3, 7.0)
    assert any_order(a * b, (a, b)).error.tolist() == (a * b).error.tolist()


def test_a_number_is_unspecified_where_some_order_overflows() -> None:
    a, b, c = exact(1e30), exact(1e20), exact(1e-30)
    assert np.isfinite((a * c * b).error).all()
    assert np.isinf(any_order(a * c * b, (a, b, c)).error).all()
    assert np.isinf(any_order(a * c, (a, c), (exact(3e38),), (exact(3e38),)).error).all()


def test_an_infinity_times_a_vanishing_factor_is_open_to_others_alone() -> None:
    for contract, is_open in ((DOCUMENTED, False), (OPEN, True)):
        arithmetic = replace(SINGLE, contract=contract)
        large, small = (Bounded.exact(np.array([x]), arithmetic) for x in (np.inf, 1e-30))
        assert np.isinf(any_order(large * small, (large, small, small)).error).all() == is_open


def test_either_formula_admits_the_less_accurate_one() -> None:
    a = Bounded(np.array([1.0, 2.0]), np.array([0.5, 0.0]), SINGLE)
    b = Bounded(np.array([1.0, np.nan]), np.array([0.75, 0.0]), SINGLE)
    assert either_formula(a, b).error.tolist() == [0.75, np.inf]
