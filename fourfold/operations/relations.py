"""Relations that laws state about results: restricted to some places, exact or within bounds."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fourfold.numerics.bounded import Bounded
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case, is_floating
from fourfold.operations.record import Evaluate, Law, Relation

# Returns the output for a case.
Output = Callable[[Case], Bounded]
# The inputs of a case by name, in a dtype that is wider than the tested one.
Inputs = Mapping[str, np.ndarray]


def only(mask: np.ndarray | np.bool, result: Bounded) -> Bounded:
    """Return a result restricted to some places, and 0 elsewhere.

    Args:
        mask: booleans, of the result's shape or broadcast to it.
        result: a result of any shape.
    """
    mask = np.broadcast_to(mask, result.shape)
    return Bounded(np.where(mask, result.value, 0), np.where(mask, result.error, 0), result.arithmetic)


def exactly(value: Any, like: Bounded) -> Bounded:
    """Return a value without error, in the shape and the arithmetic of a result.

    Args:
        value: a number or an array that is broadcast to the result's shape.
        like: the result.
    """
    return Bounded.exact(np.broadcast_to(np.asarray(value, dtype=like.value.dtype), like.shape), like.arithmetic)


def equal_where(mask: np.ndarray | np.bool, actual: Bounded, expected: Bounded) -> Relation:
    """Return the relation that two results are equal in some places, within the sum of their bounds."""
    return Relation(only(mask, actual), only(mask, expected))


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


def between(actual: Bounded, low: Any, high: Any) -> Relation:
    """Return the relation that a result lies between two values, within its own bound."""
    return equals(actual, np.clip(actual.value, low, high))


def law(name: str, sides: Callable[[Output, Case, Inputs], tuple[Bounded, Any]], exact: bool = False) -> Law:
    """Return the law that two sides are equal.

    Args:
        name: a sentence, as a Python name.
        sides: returns the left side, and the right side, which is a result or known values.
        exact: whether they are equal to the last bit, everywhere. Otherwise they are equal within their bounds, where
            the right side does not overflow.
    """

    def relations(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
        wide = {n: array.astype(dtype.wide) if is_floating(array) else array for n, array in case.inputs.items()}
        with np.errstate(all="ignore"):
            left, right = sides(lambda c: evaluate(c).output, case, wide)
        if exact:
            yield equals_exactly(left, right)
            return
        right = right if isinstance(right, Bounded) else exactly(right, left)
        yield equal_where(np.isfinite(right.value) & (abs(right.value) < dtype.largest), left, right)

    relations.__name__ = name
    return relations


def linear_in(name: str) -> Law:
    """Return the law that half of an input gives half of the output, exactly, where nothing is subnormal."""

    def relations(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
        full, half = evaluate(case).output, evaluate(case.with_inputs(**{name: case[name] / 2})).output
        smallest = np.minimum(abs(full.value), abs(case[name].astype(dtype.wide)))
        normal = np.isfinite(full.value) & (smallest > 4 * dtype.smallest_normal)
        yield equals_exactly(only(normal, half), only(normal, full / 2))

    relations.__name__ = f"output_is_linear_in_{name}"
    return relations
