"""The comparator accepts values within the bound, rejects all others, and says where and by how much they are off."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from fourfold.checks.records import operations
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.compare import Agreement, Disagreement, compare, expectation
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.record import reference_gradients

FLOAT16, FLOAT32 = DTYPES["float16"], DTYPES["float32"]
NAN, INF = np.nan, np.inf


def within(value: Any, bound: Any) -> Bounded:
    value = np.array(value, dtype=np.float64)
    return Bounded(value, np.broadcast_to(np.asarray(bound, dtype=np.float64), value.shape), FLOAT32.arithmetic)


def held(actual: Any, value: Any, bound: Any, dtype: Any = FLOAT32, what: str = "output") -> Agreement:
    return compare(np.array(actual, dtype=np.float64), within(value, bound), dtype, what)


@pytest.mark.parametrize(
    ("actual", "value", "bound"),
    [
        pytest.param(1.0, 1.0, 0.0, id="equal"),
        pytest.param(1.5, 1.0, 0.5, id="at_the_bound"),
        pytest.param(0.5, 1.0, 0.5, id="at_the_bound_below"),
        pytest.param(-0.0, 0.0, 0.0, id="either_zero"),
        pytest.param(NAN, NAN, 0.0, id="nan"),
        pytest.param(INF, INF, 0.0, id="infinity"),
        pytest.param(-INF, -INF, 0.0, id="negative_infinity"),
        pytest.param(NAN, 1.0, INF, id="nan_where_nothing_is_known"),
        pytest.param(-INF, 1.0, INF, id="infinity_where_nothing_is_known"),
        pytest.param(7.0, NAN, INF, id="number_where_nothing_is_known"),
    ],
)
def test_what_is_within_the_bound_is_accepted(actual: float, value: float, bound: float) -> None:
    assert held([0.0, actual], [0.0, value], [0.0, bound]).worst <= 1


@pytest.mark.parametrize(
    ("actual", "value", "bound"),
    [
        pytest.param(np.nextafter(1.5, 2), 1.0, 0.5, id="just_past_the_bound"),
        pytest.param(1.0, -1.0, 0.5, id="other_sign"),
        pytest.param(5e-324, 0.0, 0.0, id="any_error_where_none_is_allowed"),
        pytest.param(NAN, 1.0, 1e30, id="nan_for_a_number"),
        pytest.param(NAN, 0.0, 0.0, id="nan_for_zero"),
        pytest.param(1.0, NAN, 0.0, id="number_for_nan"),
        pytest.param(0.0, NAN, 0.0, id="zero_for_nan"),
        pytest.param(INF, NAN, 0.0, id="infinity_for_nan"),
        pytest.param(NAN, INF, 0.0, id="nan_for_infinity"),
        pytest.param(-INF, INF, 0.0, id="infinity_of_the_other_sign"),
        pytest.param(3.4e38, INF, 0.0, id="largest_number_for_infinity"),
        pytest.param(INF, 1.0, 1e30, id="infinity_for_a_number"),
        pytest.param(-INF, 3.4e38, 1e38, id="overflow_to_the_other_side"),
    ],
)
def test_what_is_not_within_the_bound_is_rejected(actual: float, value: float, bound: float) -> None:
    with pytest.raises(Disagreement, match=re.escape("output[1] is")):
        held([0.0, actual, 0.0], [0.0, value, 0.0], [1.0, bound, 1.0])


def test_no_nan_hides_a_wrong_element() -> None:
    with pytest.raises(Disagreement, match=re.escape("output[2] is 9.0")):
        held([NAN, 1.0, 9.0], [NAN, 1.0, 1.0], 0.5)
    with pytest.raises(Disagreement, match="2 of 3 elements are wrong"):
        held([NAN, NAN, 9.0], [NAN, 1.0, 1.0], 0.5)


def test_a_value_past_the_edge_of_float16_may_be_infinite() -> None:
    for value in (FLOAT16.overflow, 70000.0):
        expected = expectation(within(value, 0.0), FLOAT16)
        assert compare(np.array(INF), expected, FLOAT16).worst == 0
        with pytest.raises(Disagreement):
            compare(np.array(-INF), expected, FLOAT16)
    # float16 overflows from halfway to the next power of 2, where rounding to even goes up. A smaller value may
    # overflow if its error reaches that point.
    assert FLOAT16.overflow == 65520
    assert compare(np.array(-INF), expectation(within(-65520.0, 0.0), FLOAT16), FLOAT16).worst == 0
    assert compare(np.array(INF), expectation(within(65510.0, 10.0), FLOAT16), FLOAT16).worst == 0


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_infinity_begins_where_rounding_to_the_type_makes_it(dtype: str) -> None:
    kind = DTYPES[dtype]
    below = kind.overflow * (1 - kind.wide(kind.roundoff) / 16)
    with np.errstate(over="ignore"):
        assert np.isinf(np.asarray(kind.overflow).astype(kind.numpy))
        assert np.asarray(below).astype(kind.numpy) == kind.largest
    exactly = Bounded.exact(np.array([kind.overflow, below]), kind.arithmetic)
    infinite = np.array([INF, INF], dtype=kind.wide)
    assert compare(infinite[:1], expectation(exactly[:1], kind), kind).worst == 0
    with pytest.raises(Disagreement):
        compare(infinite[1:], expectation(exactly[1:], kind), kind)


def test_a_value_below_the_edge_of_float16_may_not_be_infinite() -> None:
    for value in (np.nextafter(65520.0, 0.0), FLOAT16.largest, FLOAT16.largest - 1, 60000.0, 1.0):
        with pytest.raises(Disagreement):
            compare(np.array(INF), expectation(within(value, 0.0), FLOAT16), FLOAT16)
    with pytest.raises(Disagreement):
        compare(np.array(INF), expectation(within(FLOAT16.largest, 0.0), FLOAT32), FLOAT32)


def test_overflow_may_not_saturate() -> None:
    with pytest.raises(Disagreement):
        compare(np.array(FLOAT16.largest), expectation(within(70000.0, 0.0), FLOAT16), FLOAT16)


@pytest.mark.full(but=8)
@pytest.mark.parametrize("name", operations())
def test_zeros_are_no_gradient(name: str) -> None:
    operation = operations()[name]
    rejected = 0
    for make in operation.examples.values():
        for key, expected in reference_gradients(operation, make(FLOAT32), FLOAT32).items():
            expected = expectation(expected, FLOAT32)
            # The error of a NaN is 0, or infinite where any result is allowed.
            if np.any((abs(expected.value) > expected.error) | (np.isnan(expected.value) & (expected.error == 0))):
                with pytest.raises(Disagreement, match=key):
                    compare(np.zeros(expected.shape), expected, FLOAT32, f"gradient of {key}")
                rejected += 1
    assert rejected >= 2 * len(operation.differentiable)


def test_a_nan_makes_a_sum_nan_beside_unknown_terms() -> None:
    terms = within([[NAN, 1.0], [NAN, 2.0], [3.0, 4.0]], [[0.0, INF], [INF, 1.0], [0.0, 0.0]])
    for sums in (np.sum(terms, axis=1), np.cumsum(terms, axis=1)[:, 1]):
        assert sums.error[0] == 0
        assert sums.error[1] == INF
        assert np.isfinite(sums.error[2])


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1), (6,), (), (1, 2, 3), (0,), (2, 1)])
def test_another_shape_is_rejected_and_both_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(Disagreement, match=re.escape(f"shape {list(shape)}, expected [2, 3]")):
        compare(np.zeros(shape), within(np.zeros((2, 3)), 1.0), FLOAT32)


def test_elements_that_nothing_is_known_of_are_counted() -> None:
    agreement = held([[1, NAN], [INF, 4]], [[1, 2], [3, 4]], [[0, INF], [INF, 1]])
    assert agreement == Agreement(worst=0.0, elements=4, unspecified=2)


def test_the_worst_ratio_is_that_of_the_worst_element() -> None:
    assert held([1.5, 2.25, 3.0], [1.0, 2.0, 3.0], [1.0, 0.25, 0.0]).worst == 1.0
    assert held([1.5, 2.1, 3.0], [1.0, 2.0, 3.0], [1.0, 1.0, 0.0]).worst == 0.5
    assert held([INF, NAN, 2.0], [INF, NAN, 2.0], 0.0).worst == 0.0


def test_the_message_says_where_what_and_by_how_much() -> None:
    actual, value = np.arange(12.0).reshape(3, 4), np.arange(12.0).reshape(3, 4)
    actual[2, 1] += 0.75  # three times its bound
    actual[0, 3] += 0.5
    with pytest.raises(Disagreement) as raised:
        held(actual, value, 0.25, what="gradient of pred")
    message = str(raised.value)
    assert "gradient of pred[2, 1] is 9.75" in message
    assert "expected 9.0 within 0.25" in message
    assert "error over bound 3;" in message
    assert "2 of 12 elements are wrong" in message


def test_a_scalar_is_named_without_index() -> None:
    with pytest.raises(Disagreement, match=re.escape("output[] is 2.0, expected 1.0 within 0.5")):
        held(2.0, 1.0, 0.5)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_nothing_agrees_with_nothing(shape: tuple[int, ...]) -> None:
    agreement = compare(np.zeros(shape), within(np.zeros(shape), 0.0), FLOAT32)
    assert agreement == Agreement(worst=0.0, elements=0, unspecified=0)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_expectation_admits_one_rounding_to_the_type_and_not_two(dtype: str) -> None:
    kind = DTYPES[dtype]
    rng = np.random.default_rng(1)
    scale = np.ldexp(1.0, rng.integers(-26, 12, 4000)).astype(kind.wide)
    # Add a second, tiny draw, so that all digits of a longdouble are random.
    digits = rng.uniform(1, 2, 4000).astype(kind.wide) + rng.uniform(0, 1, 4000).astype(kind.wide) / 2**53
    value = digits * scale * rng.choice([-1, 1], 4000)
    expected = expectation(Bounded.exact(value, kind.arithmetic), kind)
    rounded = value.astype(kind.numpy).astype(kind.wide)
    assert compare(rounded, expected, kind).worst <= 1
    assert compare(rounded, expected, kind).worst > 0.9
    # One more unit in the last place is too much.
    further = rounded + 2 * np.sign(rounded) * kind.spacing_roundoff(abs(value))
    with pytest.raises(Disagreement):
        compare(further, expected, kind)


def test_the_expectation_leaves_special_values_and_the_unknown_as_they_are() -> None:
    expected = expectation(within([NAN, INF, -INF, 1.0], [0, 0, 0, INF]), FLOAT32)
    assert expected.error.tolist() == [0, 0, 0, INF]


@pytest.mark.filterwarnings("error")
def test_a_signalling_nan_is_a_nan() -> None:
    """Unwritten memory may hold one."""
    assert np.isnan(FLOAT32.array(torch.tensor([0x7FA00000], dtype=torch.int32).view(torch.float32))).all()
