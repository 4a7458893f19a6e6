"""The bounds hold for every admitted way to compute a result, and are too narrow for ways that are not admitted."""

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from drawing import collect
from fourfold.oracles import giou
from fourfold.properties.boxes import PAIRS, box_pairs
from samples import sampled

from fourfold.checks.records import operations
from fourfold.numerics.bounded import (
    RULES,
    Bounded,
    Comparison,
    lift,
)
from fourfold.numerics.compare import compare, expectation
from fourfold.numerics.dtypes import DTYPES, INTEGERS
from fourfold.numerics.steps.along_axes import SEQUENTIAL_TERMS, summation_growth
from fourfold.numerics.steps.elementwise import DIVISION, REORDERING
from fourfold.operations.case import Case
from fourfold.operations.record import reference, reference_gradients

OPERATIONS = operations()
FLOAT32 = DTYPES["float32"]
SINGLE = FLOAT32.arithmetic
COLUMNS = 64

pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")


def exact(*values: float) -> Bounded:
    return Bounded.exact(np.array(values, dtype=np.float64), SINGLE)


def thirds_less_one() -> Bounded:
    """Return 0 with a rounding error, so that its computed sign is unknown."""
    third = exact(1 / 3)
    return third + third + third - exact(3 * (1 / 3))


def assert_within(actual: np.ndarray, expected: Bounded, what: Any = None) -> int:
    """Assert that each value is within its bound and in its class; return how many values had a finite bound."""
    expected = expected.matching_length(actual)
    assert actual.shape == expected.shape, what
    held = np.isfinite(expected.error)
    ordinary = held & np.isfinite(expected.value)
    error = abs(actual[ordinary].astype(np.float64) - expected.value[ordinary])
    assert np.all(error <= expected.error[ordinary]), what
    special = held & ~ordinary
    assert np.array_equal(actual[special].astype(np.float64), expected.value[special], equal_nan=True), what
    return int(np.count_nonzero(ordinary))


# A program is a list of steps, each an operation on two earlier results. It runs on bounded arrays and, in float32,
# in each way that a correct kernel may choose.
Program = list[tuple[str, int, int]]
STEPS = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "where")


def random_program(rng: np.random.Generator, inputs: int, length: int = 6, steps: tuple[str, ...] = STEPS) -> Program:
    return [
        (str(rng.choice(steps)), int(rng.integers(inputs + done)), int(rng.integers(inputs + done)))
        for done in range(length)
    ]


def plainly(program: Program, inputs: list) -> list:
    """Run a program as written, in the arithmetic of the inputs."""
    results = list(inputs)
    for step, i, j in program:
        a, b = results[i], results[j]
        results.append(np.where(a < b, b - a, a * 0.1) if step == "where" else getattr(np, step)(a, b))
    return results


def with_reciprocals(program: Program, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run a program with reciprocals for quotients, sums for differences, and swapped factors and summands.

    Do not swap the operands of extremes: either of two zeros may be the larger, and a quotient by it shows which.
    """
    results = list(inputs)
    for step, i, j in program:
        a, b = results[i], results[j]
        if step == "divide":
            results.append((np.float32(1) / b) * a)
        elif step == "subtract":
            results.append(-b + a)
        elif step == "where":
            results.append(np.where(b > a, -(a - b), a / 10))
        elif step in ("add", "multiply"):
            results.append(getattr(np, step)(b, a))
        else:
            results.append(getattr(np, step)(a, b))
    return results


def with_fused_products(program: Program, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run a program with fused multiply-adds: a product is not rounded before it is added to something."""
    results, products = list(inputs), {}
    for step, i, j in program:
        a, b = results[i], results[j]
        sign = {"add": 1.0, "subtract": -1.0}.get(step)
        if sign and i in products:
            results.append((products[i] + sign * b.astype(np.float64)).astype(np.float32))
        elif sign and j in products:
            results.append((a.astype(np.float64) + sign * products[j]).astype(np.float32))
        elif step == "where":
            results.append(plainly([(step, 0, 1)], [a, b])[-1])
        else:
            if step == "multiply":
                products[len(results)] = a.astype(np.float64) * b.astype(np.float64)
            results.append(getattr(np, step)(a, b))
    return results


def random_inputs(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Return inputs of many magnitudes and both signs, some 0 and some equal."""
    scale = 10.0 ** rng.integers(-3, 4, (count, COLUMNS))
    inputs = list((rng.normal(0, 1, (count, COLUMNS)) * scale).astype(np.float32))
    inputs[0][rng.random(COLUMNS) < 0.1] = 0
    same = rng.random(COLUMNS) < 0.1
    inputs[1][same] = inputs[0][same]
    return inputs


@pytest.mark.parametrize("compute", [plainly, with_reciprocals, with_fused_products])
def test_random_expressions_stay_within_their_bounds(compute: Callable) -> None:
    rng = np.random.default_rng(11)
    held = total = 0
    for _ in range(400):
        inputs = random_inputs(rng, 3)
        program = random_program(rng, len(inputs))
        bounded = plainly(program, [Bounded.exact(x.astype(np.float64), SINGLE) for x in inputs])
        computed = compute(program, inputs)
        for x, expected in zip(computed[len(inputs) :], bounded[len(inputs) :]):
            assert x.dtype == np.float32
            held += assert_within(x, expected, program)
            total += x.size
    # Few bounds are infinite: after an overflow, or a division by a value that may be 0.
    assert held > total / 2


def test_expressions_in_half_precision_leave_their_bounds() -> None:
    rng = np.random.default_rng(12)
    outside = total = 0
    for _ in range(100):
        inputs = [rng.uniform(0.5, 2, COLUMNS).astype(np.float32) for _ in range(3)]
        program = random_program(rng, 3, steps=("add", "multiply", "divide"))
        expected = plainly(program, [Bounded.exact(x.astype(np.float64), SINGLE) for x in inputs])[-1]
        actual = plainly(program, [x.astype(np.float16) for x in inputs])[-1]
        outside += int(np.count_nonzero(abs(actual.astype(np.float64) - expected.value) > expected.error))
        total += actual.size
    assert outside > 0.9 * total


def test_bounds_of_positive_chains_are_a_few_roundings_a_step() -> None:
    rng = np.random.default_rng(13)
    for length in (1, 4, 16):
        result = exact(*rng.uniform(0.5, 2, COLUMNS))
        for _ in range(length):
            operand = exact(*rng.uniform(0.5, 2, COLUMNS))
            result = getattr(np, str(rng.choice(["add", "multiply", "divide"])))(result, operand)
        relative = result.error / abs(result.value)
        steps = length * REORDERING * DIVISION * SINGLE.roundoff
        assert np.all(relative <= steps * (1 + steps))
        assert np.all(relative >= REORDERING * SINGLE.roundoff)


def in_compute_dtype(case: Case, dtype: Any) -> dict[str, Any]:
    """Return the inputs in the compute dtype of the kernels."""
    compute = np.float64 if dtype.name == "float64" else np.float32
    return {
        name: array if np.issubdtype(array.dtype, np.integer) else array.astype(compute)
        for name, array in case.inputs.items()
    }


@pytest.mark.full(but=8)
@pytest.mark.parametrize("dtype", sampled(DTYPES, "float32"))
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_formula_in_the_kernels_arithmetic_stays_within_its_bound(name: str, dtype: str) -> None:
    operation, kind = OPERATIONS[name], DTYPES[dtype]
    held = 0
    for case in collect(operation.cases(kind, 1024), 40):
        inputs = in_compute_dtype(case, kind)
        compute = next(x.dtype for x in inputs.values() if np.issubdtype(x.dtype, np.floating))
        output = np.asarray(operation.forward(**inputs, **case.parameters))
        gradients: tuple[np.ndarray, ...] = ()
        if operation.differentiable:
            gradients = operation.backward(np.asarray(case.grad_output.astype(compute)), **inputs, **case.parameters)
        expected = [reference(operation, case, kind), *reference_gradients(operation, case, kind).values()]
        chosen = np.dtype(operation.returns) if operation.returns in INTEGERS else compute
        for actual, bounded in zip((output, *gradients), expected, strict=True):
            assert actual.dtype == chosen
            held += assert_within(np.atleast_1d(actual), bounded.reshape(-1) if bounded.ndim == 0 else bounded, case)
    assert held > (100 if operation.length_varies else 1000)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_kind_of_box_pair_stays_within_its_bound(dtype: str) -> None:
    kind = DTYPES[dtype]
    compute = np.float64 if dtype == "float64" else np.float32
    rng = np.random.default_rng(14)
    grad_output = rng.normal(0, 2, 2000).astype(kind.numpy)
    for pair in PAIRS:
        boxes = box_pairs(rng, 2000, (pair,), kind)
        case = Case(dict(zip(("boxes1", "boxes2"), boxes)), grad_output, {"eps": 1e-5})
        a, b = (box.astype(compute) for box in boxes)
        actual = (giou.forward(a, b), *giou.backward(grad_output.astype(compute), a, b))
        gradients = reference_gradients(OPERATIONS["giou"], case, kind)
        for x, bounded in zip(actual, (reference(OPERATIONS["giou"], case, kind), *gradients.values())):
            assert x.dtype == compute
            assert_within(x, bounded, pair)


def test_bounds_of_overlapping_boxes_keep_all_but_a_few_digits() -> None:
    rng = np.random.default_rng(15)
    boxes1, boxes2 = box_pairs(rng, 2000, ("overlapping",), FLOAT32)
    case = Case({"boxes1": boxes1, "boxes2": boxes2}, rng.normal(0, 2, 2000).astype(np.float32), {"eps": 1e-5})
    forward, backward = OPERATIONS["giou"].cost(case)
    gradients = reference_gradients(OPERATIONS["giou"], case, FLOAT32)
    for bounded, flops in [
        (reference(OPERATIONS["giou"], case, FLOAT32), forward.flops / 2000),
        *((gradient, backward.flops / 2000) for gradient in gradients.values()),
    ]:
        # Assume that every operation is the least exact one and that no errors cancel.
        allowed = flops * REORDERING * DIVISION * SINGLE.roundoff
        assert np.median(bounded.error / abs(bounded.value)) < allowed


def test_inputs_and_what_arithmetic_has_are_without_error() -> None:
    assert exact(0.1).error == 0
    for constant in (0.0, 1.0, -3.0, 0.5, 2.0**24, np.inf, -np.inf, np.nan, float(np.float32(0.1))):
        assert lift(constant, SINGLE).error == 0


@pytest.mark.parametrize("constant", [0.1, 1e-5, -1 / 3, 2.0**24 + 1, 1e30])
def test_other_constants_are_rounded_once(constant: float) -> None:
    lifted = lift(constant, SINGLE)
    assert abs(float(np.float32(constant)) - constant) <= lifted.error <= abs(constant) * SINGLE.roundoff


def test_nothing_is_known_of_a_quotient_whose_divisor_may_be_zero() -> None:
    zero = thirds_less_one()
    assert zero.error > 0
    nearly = zero + exact(float(zero.error[0]) / 2)
    for divisor in (zero, nearly, -nearly):
        assert np.isinf((1.0 / divisor).error)
        assert np.isinf((divisor / divisor).error)
        assert np.isinf((exact(np.inf) / divisor).error)
    away = zero + exact(4 * float(zero.error[0]))
    assert np.isfinite((1.0 / away).error)


def test_nothing_is_known_where_infinity_or_zero_meets_what_may_be_zero() -> None:
    zero = thirds_less_one()
    assert np.isinf((zero * np.inf).error)
    assert np.isinf((-np.inf * zero).error)
    assert np.isinf((zero / exact(0.0)).error)
    assert (exact(0.0) * np.inf).error == 0


def test_nothing_is_known_past_the_largest_number() -> None:
    huge = exact(1e30)
    for overflown in (huge * huge, huge / exact(1e-30), exact(SINGLE.largest) + exact(SINGLE.largest)):
        assert np.isfinite(overflown.value)
        assert np.isinf(overflown.error)
    # At the limit, rounding decides whether the sum overflows.
    assert np.isinf((exact(SINGLE.largest) + 0.0).error)
    assert np.isfinite((exact(SINGLE.largest / 2) + 0.0).error)


def test_nothing_is_known_of_a_sum_that_may_overflow_on_its_way() -> None:
    values = np.array([3e38, 3e38, -3e38, -3e38])
    assert not np.isfinite(np.cumsum(values.astype(np.float32))[-1])
    assert np.isinf(np.sum(exact(*values)).error)
    assert np.isfinite(np.sum(exact(*values / 4)).error)


def test_what_is_unknown_stays_unknown() -> None:
    unknown = exact(1e30) * exact(1e30)
    results = [
        unknown + 1.0,
        unknown - unknown,
        unknown * 0.0,
        exact(1.0) / unknown,
        unknown * np.nan,
        -unknown,
        np.maximum(unknown, 1.0),
        np.minimum(1.0, unknown),
        np.maximum(unknown, np.nan),
        np.where(unknown > 1.0, exact(1.0), exact(np.inf)),
        np.sum(unknown),
        np.stack([unknown, exact(1.0)])[0],
        np.broadcast_to(unknown, (3,)),
    ]
    for result in results:
        assert np.all(np.isinf(result.error))


SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.0)
OF_BITS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert)  # they take integers or booleans
UFUNCS = [function for function in RULES if isinstance(function, np.ufunc) and function not in OF_BITS]


@pytest.mark.parametrize("function", UFUNCS, ids=lambda function: function.__name__)
def test_special_values_are_those_of_numpy_and_certain(function: np.ufunc) -> None:
    operands = [x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL)][: function.nin]
    if function is np.matmul:  # each product has one term
        operands = [operands[0][:, None], operands[1][None, :]]
    expected = function(*operands)
    result = function(*(Bounded.exact(x, SINGLE) for x in operands))
    if isinstance(result, Comparison):
        assert np.array_equal(result.outcome, expected)
        assert not result.uncertain.any()
    else:
        assert np.array_equal(result.value, expected, equal_nan=True)
        assert np.all(result.error[~np.isfinite(expected)] == 0)
        assert np.all(np.isfinite(result.error))


def test_infinity_swallows_errors_and_nan_keeps_its_class() -> None:
    third = exact(1 / 3) + exact(1 / 3)
    for result in (third + np.inf, third - np.inf, third * np.inf, np.inf / third, np.maximum(third, np.inf)):
        assert np.isinf(result.value)
        assert result.error == 0
    assert (third / np.inf).error <= SINGLE.smallest_normal
    for result in (third + np.nan, third * np.nan, np.minimum(third, np.nan), np.sum(np.stack([third, exact(np.nan)]))):
        assert np.isnan(result.value)
        assert result.error == 0


def test_no_comparison_with_nan_hangs_on_rounding() -> None:
    third = exact(1 / 3) + exact(1 / 3)
    for compared in (third >= np.nan, exact(np.nan) >= 0.1, exact(np.nan) == third):
        assert not compared.outcome
        assert not compared.uncertain


def test_a_difference_of_equal_inputs_is_zero_for_certain() -> None:
    difference = exact(0.1, 7.25) - exact(0.1, 7.25)
    assert np.all(difference.error == 0)
    assert not (difference >= 0.0).uncertain.any()
    product = difference * exact(3.3, 4.4)
    assert np.all(product.error == 0)
    # A difference with an earlier rounding is not exact.
    assert thirds_less_one().error > 0
    assert (thirds_less_one() >= 0.0).uncertain


def area(*boxes: list[float]) -> Bounded:
    box = Bounded.exact(np.array(boxes), SINGLE)
    return (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])


def test_comparisons_of_exact_areas_do_not_hang_on_rounding() -> None:
    once = area([0.5, 0.25, 1.0, 0.75], [300, 300, 900, 1200])
    for compared in (once >= 0.25, 4.0 * once - 3.0 * once == once, np.maximum(once, 0.25) >= 0.25):
        assert not compared.uncertain.any()
    # An intermediate rounding makes it uncertain: a side whose square does not fit, or a constant that is rounded.
    rough = area([1 / 8192, 0, 4097.0, 4097.0])
    assert (rough >= rough.value).uncertain.all()
    tenth = exact(0.5) * 0.1
    assert (tenth >= 0.05).uncertain
    # Below the normal numbers it is uncertain too: some implementations flush them to 0.
    small = exact(2.0**-80) * exact(2.0**-70)
    assert (small > 0.0).uncertain


def test_what_cancels_on_the_way_is_not_exact_in_every_order() -> None:
    # 3 + 5 + 2^26 is exact, but 3 + 2^26 + 5 is not.
    total = exact(3.0) + exact(5.0) + exact(2.0**26)
    assert (total >= 2.0**26 + 8).uncertain


def test_exact_sums_of_products_are_so_in_every_order_and_fused() -> None:
    rng = np.random.default_rng(19)
    checked = 0
    for _ in range(2000):
        scale = 2.0 ** rng.integers(-3, 9, 6)
        factors = np.float32(rng.integers(-99, 100, 6) * scale)
        bounded = [exact(float(x)) for x in factors]
        result = bounded[0] * bounded[1] + bounded[2] * bounded[3] - bounded[4] * bounded[5]
        if not result.terms.exact(SINGLE):
            continue
        checked += 1
        products = [factors[i] * factors[i + 1] for i in (0, 2, 4)]
        wide = [float(factors[i]) * float(factors[i + 1]) for i in (0, 2, 4)]
        signs = np.float32([1, 1, -1])
        for i, j, k in itertools.permutations(range(3)):
            assert (signs[i] * products[i] + signs[j] * products[j]) + signs[k] * products[k] == result.value
            fused = np.float32(float(signs[i] * products[i]) + float(signs[j]) * wide[j])
            assert np.float32(float(fused) + float(signs[k]) * wide[k]) == result.value
    assert 100 < checked < 1900


def test_where_admits_both_branches_when_the_condition_hangs_on_rounding() -> None:
    zero = thirds_less_one()
    chosen = np.where(zero > 0.0, exact(5.0), exact(-1.0))
    for branch in (5.0, -1.0):
        assert abs(branch - chosen.value) <= chosen.error
    assert np.isinf(np.where(zero > 0.0, exact(np.nan), exact(1.0)).error)
    assert np.isinf(np.where(zero > 0.0, exact(np.inf), exact(1.0)).error)
    certain = np.where(exact(1.0) > 0.0, exact(5.0), exact(-1.0))
    assert certain.value == 5
    assert certain.error == 0


def test_where_takes_the_error_of_the_branch_taken() -> None:
    rough, smooth = exact(1 / 3) + exact(1 / 3), exact(2.0)
    condition = np.array([True])
    assert np.where(condition, rough, smooth).error == rough.error
    assert np.where(~condition, rough, smooth).error == 0
    assert np.where(exact(1.0) > 0.0, 0.0, rough).error == 0


def test_extremes_take_the_error_of_the_certain_winner_only() -> None:
    rough = exact(1 / 3) + exact(1 / 3)
    assert np.maximum(rough, 9.0).error == 0
    assert np.minimum(rough, 9.0).error == rough.error
    beside = rough.value + rough.error / 2
    assert np.maximum(rough, Bounded.exact(beside, SINGLE)).error == rough.error


def test_comparisons_are_uncertain_within_the_errors_only() -> None:
    rough = exact(1 / 3) + exact(1 / 3)
    near, far = (Bounded.exact(rough.value + rough.error * factor, SINGLE) for factor in (0.5, 2.0))
    for compare_ in (np.less, np.less_equal, np.greater, np.greater_equal, np.equal):
        assert compare_(rough, near).uncertain
        assert not compare_(rough, far).uncertain
        assert not compare_(exact(0.1), exact(0.1)).uncertain
    assert ((rough < far) & (rough < near)).uncertain


def test_no_elements_are_selected_by_a_comparison_that_hangs_on_rounding() -> None:
    values = exact(1.0, 2.0)
    assert values[values > 1.0].value.tolist() == [2]
    assert np.count_nonzero(values > 1.0) == 1
    rough = exact(1 / 3) + exact(1 / 3)
    compared = rough > Bounded.exact(rough.value, SINGLE)
    with pytest.raises(ValueError, match="rounding"):
        rough[compared]
    with pytest.raises(ValueError, match="rounding"):
        rough[compared] = exact(1.0)
    with pytest.raises(ValueError, match="rounding"):
        np.count_nonzero(compared)


def pairwise(values: np.ndarray) -> np.ndarray:
    while len(values) > 1:
        half = len(values) // 2
        values = np.concatenate([values[:half] + values[half : 2 * half], values[2 * half :]])
    return values[0]


def one_after_another(values: np.ndarray) -> np.ndarray:
    return np.cumsum(values)[-1]


def from_the_end(values: np.ndarray) -> np.ndarray:
    return np.cumsum(values[::-1])[-1]


def in_blocks(values: np.ndarray) -> np.ndarray:
    blocks = np.array_split(values, int(len(values) ** 0.5))
    return one_after_another(np.array([one_after_another(block) for block in blocks]))


@pytest.mark.parametrize(
    ("terms", "add_up"),
    [
        (terms, add_up)
        for terms in (1, 2, 3, 100, 1000, SEQUENTIAL_TERMS, 100_000)
        for add_up in (pairwise, in_blocks, one_after_another, from_the_end)
        if terms <= SEQUENTIAL_TERMS or add_up in (pairwise, in_blocks)
    ],
)
def test_sums_in_float32_stay_within_their_bounds(terms: int, add_up: Callable) -> None:
    rng = np.random.default_rng(terms)
    signed = rng.normal(0, 1, terms)
    for draw in (rng.uniform(0, 1, terms), signed, signed * 10.0 ** rng.integers(-6, 7, terms)):
        values = draw.astype(np.float32)
        actual = add_up(values)
        assert actual.dtype == np.float32
        assert_within(np.atleast_1d(actual), np.sum(Bounded.exact(values.astype(np.float64), SINGLE)).reshape(1))


def test_a_long_sum_one_after_another_is_outside() -> None:
    # Where float32's spacing is 2, adding 1 again and again has no effect.
    values = np.ones(100_001, dtype=np.float32)
    values[0] = 2**24
    bounded = np.sum(Bounded.exact(values.astype(np.float64), SINGLE))
    assert one_after_another(values) == 2**24
    assert abs(float(one_after_another(values)) - bounded.value) > bounded.error
    for add_up in (pairwise, in_blocks, from_the_end):
        assert abs(float(add_up(values)) - bounded.value) <= bounded.error


@pytest.mark.parametrize("half", [ml_dtypes.bfloat16, np.float16])
def test_an_accumulator_of_half_precision_is_outside(half: type) -> None:
    values = np.random.default_rng(16).uniform(0, 1, 1000).astype(half)
    accumulator = half(0)
    for value in values:
        accumulator = half(accumulator + value)
    exactly = Bounded.exact(values.astype(np.float64), SINGLE)
    dtype = DTYPES[np.dtype(half).name]
    with pytest.raises(AssertionError, match="error over bound"):
        compare(np.array(accumulator, dtype=np.float64), expectation(np.sum(exactly), dtype), dtype)
    once_rounded = np.array(np.sum(values.astype(np.float32)).astype(half), dtype=np.float64)
    assert compare(once_rounded, expectation(np.sum(exactly), dtype), dtype).worst <= 1


def test_a_forgotten_term_is_outside() -> None:
    values = np.random.default_rng(17).uniform(0.5, 1, 1000)
    bounded = np.sum(exact(*values))
    assert abs(np.sum(values[:-1]) - bounded.value) > bounded.error


def test_sums_along_axes_are_bounded_by_the_terms_they_add() -> None:
    values = Bounded.exact(np.random.default_rng(18).uniform(1, 2, (3, 50)), SINGLE)
    rows, columns = np.sum(values, axis=1), np.sum(values, axis=0)
    assert rows.shape == (3,)
    assert columns.shape == (50,)
    assert np.sum(values, axis=1, keepdims=True).shape == (3, 1)
    assert (columns.error / columns.value).max() < (rows.error / rows.value).min()
    assert np.sum(values[:, :0], axis=1).value.tolist() == [0, 0, 0]
    assert np.all(np.sum(values[:, :0], axis=1).error == 0)


def test_growth_never_falls_with_the_number_of_terms() -> None:
    growth = [summation_growth(terms) for terms in (0, 1, 2, 10, SEQUENTIAL_TERMS, SEQUENTIAL_TERMS + 1, 10**6, 2**31)]
    assert growth[:3] == [0, 0, 1]
    assert growth == sorted(growth)
