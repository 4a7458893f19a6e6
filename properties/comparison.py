"""The one comparator: an actual array against an expected one and an elementwise bound."""

from dataclasses import dataclass

import numpy as np

from properties.dtypes import DType
from properties.running_error import Bounded


class Disagreement(AssertionError):
    """A result that differs from its reference by more than its bound."""


@dataclass(frozen=True)
class Agreement:
    """How close a comparison came: worst error in units of its bound, and how many elements it said nothing of."""

    worst: float
    elements: int
    unspecified: int


def expectation(reference: Bounded, dtype: DType) -> Bounded:
    """A reference with the rounding of its result to the output type added to its bound."""
    value, error = reference.value, reference.error
    magnitude = np.where(np.isfinite(value), abs(value) + error, 0)
    rounding = np.where(np.isfinite(value), dtype.spacing_roundoff(magnitude), 0)
    return Bounded(value, error + rounding, reference.arithmetic)


def compare(actual: np.ndarray, expected: Bounded, dtype: DType, what: str = "output") -> Agreement:
    """Hold `actual` to `expected`.

    NaN must meet NaN, and an infinity the same infinity. A finite value must lie within the bound; where that reaches
    what rounds to infinity in the type, the infinity of that side is as good. Where the bound is infinite the
    element is unspecified: anything may stand there.

    Args:
        actual: values of the tested type, in its wide type.
        expected: values and bounds, see `expectation`.
        dtype: the tested type.
        what: names the compared array in the message.

    Raises:
        Disagreement: naming the worst element.
    """
    if actual.shape != expected.shape:
        raise Disagreement(f"{what} has shape {list(actual.shape)}, expected {list(expected.shape)}")
    value, bound = expected.value, expected.error
    with np.errstate(all="ignore"):
        error = np.where(actual == value, 0.0, abs(actual - value))
        ratio = np.where(error == 0, 0.0, error / bound)
        ratio = np.where(np.isnan(actual) & np.isnan(value), 0.0, ratio)
        overflown = np.isinf(actual) & np.isfinite(value)
        # The bound holds the rounding to the type, by which numbers beside the largest pass it without being infinite.
        reachable = np.sign(actual) * value + bound >= dtype.overflow * (1 + dtype.wide(dtype.roundoff))
        ratio = np.where(overflown & reachable, 0.0, ratio)
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        unspecified = np.isinf(bound)
        ratio = np.where(unspecified, 0.0, ratio)
    agreement = Agreement(
        worst=float(ratio.max()) if ratio.size else 0.0,
        elements=int(ratio.size),
        unspecified=int(np.count_nonzero(unspecified)),
    )
    if agreement.worst > 1.0:
        at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
        index = tuple(int(i) for i in at)
        wrong = int(np.count_nonzero(ratio > 1.0))
        raise Disagreement(
            f"{what}{list(index)} is {actual[at]!s}, expected {value[at]!s} within {bound[at]:.3g}"
            f" (error over bound {agreement.worst:.3g}; {wrong} of {ratio.size} elements are wrong)"
        )
    return agreement
