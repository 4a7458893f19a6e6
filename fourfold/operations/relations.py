"""Relations that laws state about results: restricted to some places, exact or within bounds."""

from typing import Any

import numpy as np

from fourfold.numerics.bounded import Bounded
from fourfold.operations.record import Relation


def only(where: np.ndarray | np.bool, result: Bounded) -> Bounded:
    """Return a result restricted to some places, and 0 elsewhere.

    Args:
        where: booleans, of the result's shape or broadcast to it.
        result: a result of any shape.
    """
    where = np.broadcast_to(where, result.shape)
    return Bounded(np.where(where, result.value, 0), np.where(where, result.error, 0), result.arithmetic)


def exactly(value: Any, like: Bounded) -> Bounded:
    """Return a value without error, in the shape and the arithmetic of a result.

    Args:
        value: a number or an array that is broadcast to the result's shape.
        like: the result.
    """
    return Bounded.exact(np.broadcast_to(np.asarray(value, dtype=like.value.dtype), like.shape), like.arithmetic)


def equal_where(where: np.ndarray | np.bool, actual: Bounded, expected: Bounded) -> Relation:
    """Return the relation that two results are equal in some places, within the sum of their bounds."""
    return Relation(only(where, actual), only(where, expected))


def equals(actual: Bounded, value: Any) -> Relation:
    """Return the relation that a result equals a known value, within its own bound."""
    return Relation(actual, exactly(value, actual))


def equals_exactly(actual: Bounded, expected: Any) -> Relation:
    """Return the relation that two results are equal to the last bit; for foreign implementations, within their bounds.

    Args:
        actual: a result.
        expected: another result, or known values.
    """
    return Relation(actual, expected if isinstance(expected, Bounded) else exactly(expected, actual), exact=True)


def between(actual: Bounded, least: Any, most: Any) -> Relation:
    """Return the relation that a result lies between two values, within its own bound."""
    return equals(actual, np.clip(actual.value, least, most))
