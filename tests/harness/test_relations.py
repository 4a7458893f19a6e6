"""The check of a law compares exactly the elements that the law states, within the law's bound."""

from typing import Any

import numpy as np
import pytest

from fourfold.checks.laws import hold
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.compare import Disagreement
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.record import Relation
from fourfold.operations.relations import between, equal_where, equals, equals_exactly

FLOAT64 = DTYPES["float64"]
ERROR = 0.01


def result(*values: float) -> Bounded:
    """Return the values, each with an error of 0.01."""
    return Bounded(np.array(values), np.full(len(values), ERROR), FLOAT64.arithmetic)


def holds(relation: Relation, exact: bool = True) -> bool:
    """Return whether the check of laws accepts a relation."""
    try:
        list(hold(lambda *_: [relation], None, None, FLOAT64, exact))
    except Disagreement:
        return False
    return True


@pytest.mark.parametrize(
    ("relation", "right"),
    [
        (equals(result(1.0, 2.0), [1.005, 2.0]), True),
        (equals(result(1.0, 2.0), [1.02, 2.0]), False),
        (equals(result(1.0, np.nan), 1), False),
        (equals_exactly(result(1.0, 1.0), 1), True),
        (equals_exactly(result(1.0, 1.005), 1), False),
        (equals_exactly(result(np.nan), np.nan), True),
        (equal_where(np.array([True, False]), result(1.0, 2.0), result(1.015, 9.0)), True),
        (equal_where(np.array([True, False]), result(1.0, 2.0), result(1.025, 2.0)), False),
        (equal_where(np.True_, result(1.0, 2.0), result(1.0, 9.0)), False),
        (equal_where(np.array([False, True]), result(np.inf, 2.0), result(np.nan, 2.0)), True),
        (between(result(-0.005, 0.5, 1.005), 0, 1), True),
        (between(result(0.5, 1.02), 0, 1), False),
        (between(result(-0.02, 0.5), 0, 1), False),
        (between(result(-5.0, 0.5), -np.inf, np.array([0.0, 0.5])), True),
        (between(result(-5.0, 0.6), -np.inf, np.array([0.0, 0.5])), False),
    ],
)
def test_relation_holds_where_and_as_far_as_it_says(relation: Relation, right: bool) -> None:
    assert holds(relation) == right


@pytest.mark.parametrize(
    ("left", "right", "fits"),
    [
        (3 * 22016.0, np.inf, True),  # three times a result, and a result that overflowed
        (np.inf, 3 * 22016.0, True),
        (-3 * 22016.0, -np.inf, True),
        (3 * 20000.0, np.inf, False),
        (3 * 22016.0, -np.inf, False),
    ],
)
def test_either_side_may_overflow(left: float, right: float, fits: bool) -> None:
    half = DTYPES["float16"]
    sides = [Bounded(np.array([value]), np.array([16.0]), half.arithmetic) for value in (left, right)]
    agrees = True
    try:
        list(hold(lambda *_: [Relation(*sides)], None, None, half))
    except Disagreement:
        agrees = False
    assert agrees == fits


@pytest.mark.parametrize(
    ("off", "to", "right"),
    [(1.005, 1, True), (1.02, 1, False), (1.015, result(1.0, 1.0), True), (1.025, result(1.0, 1.0), False)],
)
def test_an_exact_relation_of_a_foreign_kernel_holds_within_its_bounds(off: float, to: Any, right: bool) -> None:
    relation = equals_exactly(result(1.0, off), to)
    assert holds(relation, exact=False) == right
    assert not holds(relation)
