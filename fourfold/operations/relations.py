"""What laws state about results: where they hold, and what is exact."""

from typing import Any

import numpy as np

from fourfold.numerics.bounded import Bounded
from fourfold.operations.record import Relation


def only(where: np.ndarray | np.bool, result: Bounded) -> Bounded:
    """A result in the places of which a law speaks; 0 elsewhere.

    Args:
        where: booleans, of the result's shape or broadcast to it.
        result: of any shape.
    """
    where = np.broadcast_to(where, result.shape)
    return Bounded(np.where(where, result.value, 0), np.where(where, result.error, 0), result.arithmetic)


def exactly(value: Any, like: Bounded) -> Bounded:
    """A value without error, in the shape and the arithmetic of a result.

    Args:
        value: a number or an array that is broadcast to the result's shape.
        like: the result.
    """
    return Bounded.exact(np.broadcast_to(np.asarray(value, dtype=like.value.dtype), like.shape), like.arithmetic)


def equal_where(where: np.ndarray | np.bool, actual: Bounded, expected: Bounded) -> Relation:
    """Two results are equal in some places, within the sum of their bounds."""
    return Relation(only(where, actual), only(where, expected))


def equals(actual: Bounded, value: Any) -> Relation:
    """A result is a known value, within its own bound."""
    return Relation(actual, exactly(value, actual))


def equals_exactly(actual: Bounded, value: Any) -> Relation:
    """A result is a known value, to the last bit."""
    return equals(exactly(actual.value, actual), value)


def between(actual: Bounded, least: Any, most: Any) -> Relation:
    """A result lies between two values, within its own bound."""
    return equals(actual, np.clip(actual.value, least, most))
