"""The only comparison of results: an actual array against an expected one, with a bound for each element."""

from dataclasses import dataclass

import numpy as np

from fourfold.numerics.bounded import Bounded, OneOf
from fourfold.numerics.dtypes import DType


class Disagreement(AssertionError):
    """A result that differs from its reference by more than its bound.

    Attributes:
        worst: the largest error, in units of its bound; 0 where shapes differ.
    """

    def __init__(self, message: str, worst: float = 0.0) -> None:
        super().__init__(message)
        self.worst = worst


@dataclass(frozen=True)
class Agreement:
    """The result of a comparison: worst error in units of its bound, number of elements, number of unspecified ones."""

    worst: float
    elements: int
    unspecified: int


def expectation(reference: Bounded, dtype: DType) -> Bounded:
    """Add the rounding to the output dtype to the bound of a reference that is a result of the call.

    A result chosen among given numbers is not rounded.
    """
    if isinstance(reference, OneOf):
        return reference
    value = reference.value
    with np.errstate(all="ignore"):
        error = reference.settled
    magnitude = np.where(np.isfinite(value), abs(value) + error, 0)
    rounding = np.where(np.isfinite(value), dtype.spacing_roundoff(magnitude), 0)
    return reference.within(error + rounding)


def compare(actual: np.ndarray, expected: Bounded, dtype: DType, name: str = "output") -> Agreement:
    """Check that each element of `actual` lies within its bound of `expected`.

    Where NaN is expected only NaN passes, and where an infinity is expected only the same infinity. A finite value
    must lie within the bound. If the bound reaches numbers that round to infinity in the dtype, the infinity of that
    sign passes too. Where the bound is infinite the element is unspecified, and any value passes. If several results
    are right, see `OneOf`, the nearest one is compared; it may also determine the length.

    Args:
        actual: values of the tested dtype, held in its wide type.
        expected: values and bounds, see `expectation`.
        dtype: the tested dtype.
        name: names the compared array in the message.

    Raises:
        Disagreement: naming the worst element.
    """
    expected = expected.matching_length(actual)
    if actual.shape != expected.shape:
        shapes = f"shape {list(actual.shape)}, expected {list(expected.shape)}"
        raise Disagreement(f"{name} has {shapes}{_first_difference(actual, expected.value)}")
    value, bound = expected.nearest(actual), expected.error
    with np.errstate(all="ignore"):
        error = np.where(actual == value, 0.0, abs(actual - value))
        ratio = np.where(error == 0, 0.0, error / bound)
        ratio = np.where(np.isnan(actual) & np.isnan(value), 0.0, ratio)
        overflown = np.isinf(actual) & np.isfinite(value)
        # The bound includes the rounding to the dtype, which alone takes numbers near the largest past `overflow`.
        # The factor 1 + roundoff discounts it.
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
        place = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
        index = tuple(int(i) for i in place)
        count = int(np.count_nonzero(ratio > 1.0))
        raise Disagreement(
            f"{name}{list(index)} is {actual[place]!s}, expected {value[place]!s} within {bound[place]:.3g}"
            f" (error over bound {agreement.worst:.3g}; {count} of {ratio.size} elements are wrong)",
            agreement.worst,
        )
    return agreement


def _first_difference(actual: np.ndarray, expected: np.ndarray) -> str:
    """Describe where two rows of different lengths begin to differ; return "" for other arrays."""
    if actual.ndim != 1 or expected.ndim != 1:
        return ""
    length = min(len(actual), len(expected))
    place = next(iter(np.flatnonzero(actual[:length] != expected[:length])), length)
    actual_text, expected_text = ([*map(str, array[place : place + 1]), "the end"][0] for array in (actual, expected))
    return f": at [{place}] is {actual_text}, expected {expected_text}"
