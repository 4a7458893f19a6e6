"""Running error analysis: arrays that carry a bound on the error of whoever computes them in a given arithmetic.

An oracle evaluated on `Bounded` arrays in place of NumPy arrays gives its value and, beside it, how far a correct
computation of the same formula in the tested arithmetic may be away. So no tolerance is ever typed in: a sum over many
terms, a difference of nearly equal areas or a quotient by a tiny one widens the bound by as much as it must, and
nowhere else.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.3 (running error
analysis), section 2.2 (the standard model), section 4.2 (blocked summation).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

# Errors of the elementary steps in units of roundoff. Additions and products are rounded once. Division is the least
# exact that a GPU language emits unasked (PTX div.full.f32: 2 ulp, that is 4 units).
ROUNDED_ONCE = 1.0
DIVISION = 4.0
# An exponential of 2 ulp, and the two roundings of its argument where it is taken as a power of 2 of x log2(e): that of
# the constant and that of the product, each of them |x| units in the result. As CUDA C++'s __expf, 2 + 1.173 |x| ulp.
# The maximum of a softmax must be subtracted before that product: afterwards the error grows with the inputs' offset.
EXPONENTIAL = 4.0
EXPONENT = 2.35
# A correct kernel may order its steps in another way than the oracle does (a reciprocal taken once, a fused
# multiply-add, a factor moved out of a sum). Each such change costs a few roundings more, never an order of magnitude.
REORDERING = 4.0
# Roundings' worth of what a tensor core cuts off where others round to nearest.
CUT_OFF = 2.0
# Sums of up to this many terms may be taken one after another; longer ones must be blocked or pairwise.
SEQUENTIAL_TERMS = 4096


@dataclass(frozen=True)
class Arithmetic:
    """The floating-point arithmetic a kernel computes in."""

    roundoff: float
    largest: float
    smallest_normal: float
    # That of the type in which results are kept, where it is narrower than the type they are computed in.
    storage: "Arithmetic | None" = None


def summation_growth(terms: int) -> float:
    """Growth of the error of a sum, in roundoffs of the sum of magnitudes.

    Any order of up to `SEQUENTIAL_TERMS` terms is admitted (``terms - 1``); beyond that, blocked summation with blocks
    of about sqrt(terms), whose bound is ``2 sqrt(terms)``.
    """
    if terms <= SEQUENTIAL_TERMS:
        return float(max(terms - 1, 0))
    return SEQUENTIAL_TERMS + 2.0 * float(np.sqrt(terms))


class FollowsArrayFunctions:
    """Sends NumPy's functions to the rules of this module."""

    def __array_function__(self, function: Callable, types: Sequence[type], args: tuple, kwargs: dict) -> Any:
        rule = FUNCTIONS.get(function.__name__)
        if rule is None:
            return NotImplemented
        with np.errstate(all="ignore"):
            return rule(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class Verdict(FollowsArrayFunctions):
    """A comparison of bounded arrays: its outcome, and where the computed outcome may differ from it."""

    outcome: np.ndarray
    uncertain: np.ndarray
    arithmetic: Arithmetic

    def __and__(self, other: "Verdict") -> "Verdict":
        return Verdict(self.outcome & other.outcome, self.uncertain | other.uncertain, self.arithmetic)


@dataclass(frozen=True, eq=False)
class Terms:
    """The sums and products of given numbers that make a value: `unit` divides each, `reach` is their total.

    Where `reach` is at most 1 / roundoff units, every partial sum of the terms, in any order and with products fused
    into it or not, is a multiple of the unit that the arithmetic has: all correct kernels compute the value exactly.
    The unit of what was rounded on the way is 0.
    """

    unit: np.ndarray
    reach: np.ndarray

    @classmethod
    def of(cls, value: np.ndarray, exact: np.ndarray) -> Self:
        """Of a number that stands for itself, where it is exact."""
        double = np.asarray(value, dtype=np.float64)
        fraction, exponent = np.frexp(double)
        digits = np.where(np.isfinite(fraction), np.ldexp(fraction, 53), 0).astype(np.int64)
        unit = np.ldexp((digits & -digits).astype(np.float64), exponent - 53)
        unit = np.where(double == 0, np.inf, unit)
        return cls(np.where(exact & (value == double), unit, 0), abs(value))

    def __add__(self, other: "Terms") -> "Terms":
        return Terms(np.minimum(self.unit, other.unit), self.reach + other.reach)

    def __mul__(self, other: "Terms") -> "Terms":
        return Terms(self.unit * other.unit, self.reach * other.reach)

    def exact(self, arithmetic: Arithmetic) -> np.ndarray:
        """Where no order of the steps rounds, overflows or underflows."""
        within = (self.reach * arithmetic.roundoff <= self.unit) & (self.reach <= arithmetic.largest)
        return within & (self.unit >= arithmetic.smallest_normal)


class Bounded(FollowsArrayFunctions, np.lib.mixins.NDArrayOperatorsMixin):
    """An array of exact values, with a bound on the absolute error of each.

    A value that is NaN or infinite has error 0: its class is certain. An error of infinity says that nothing is known
    (a divisor that may be 0, a step that overflows the arithmetic though its exact value is finite).

    `least` is below whatever may be computed: ``value - error``, but where a maximum has just set a tighter limit,
    which a root keeps and a division makes use of.

    `terms` tell where a comparison cannot hang on rounding: see `Terms`. The error of a value that every correct kernel
    computes exactly is left as it is, for what follows from it may be computed by other steps.
    """

    __slots__ = ("_least", "_terms", "arithmetic", "error", "value")

    def __init__(
        self,
        value: np.ndarray,
        error: np.ndarray,
        arithmetic: Arithmetic,
        least: np.ndarray | None = None,
        terms: Callable[[], Terms] | None = None,
    ):
        self.value, self.error, self.arithmetic, self._least, self._terms = value, error, arithmetic, least, terms

    @property
    def least(self) -> np.ndarray:
        """What no computed value lies below."""
        with np.errstate(invalid="ignore"):
            return self.value - self.error if self._least is None else self._least

    @property
    def terms(self) -> Terms:
        """What the value is made of: itself, where it is free of error, unless a step has said more."""
        return Terms.of(self.value, self.error == 0) if self._terms is None else self._terms()

    @classmethod
    def exact(cls, value: np.ndarray, arithmetic: Arithmetic) -> Self:
        """An input: given, hence free of error."""
        return cls(value, np.zeros_like(value), arithmetic)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of value and error."""
        return self.value.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.value.ndim

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, key: Any) -> "Bounded":
        if isinstance(key, Verdict):
            key = certain(key)
        return Bounded(self.value[key], self.error[key], self.arithmetic)

    def __setitem__(self, key: Any, item: "Bounded") -> None:
        if isinstance(key, Verdict):
            key = certain(key)
        self.value[key], self.error[key] = item.value, item.error

    def reshape(self, *shape: Any) -> "Bounded":
        """As numpy.ndarray.reshape."""
        return Bounded(self.value.reshape(*shape), self.error.reshape(*shape), self.arithmetic)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        rule = UFUNCS.get(ufunc.__name__)
        if method != "__call__" or kwargs or rule is None:
            return NotImplemented
        with np.errstate(all="ignore"):
            return rule(*(lift(x, self.arithmetic) for x in inputs))


def certain(verdict: Verdict) -> np.ndarray:
    """The outcome of a comparison that decides which elements are looked at; it must not hang on rounding."""
    if verdict.uncertain.any():
        raise ValueError("a comparison that selects elements depends on rounding errors")
    return verdict.outcome


def lift(x: Any, arithmetic: Arithmetic) -> Bounded:
    """Any operand as a `Bounded`: a constant that the arithmetic lacks is rounded once when a kernel reads it."""
    if isinstance(x, Bounded):
        return x
    value = np.asarray(x, dtype=np.longdouble)
    digits = np.frexp(value)[0] / arithmetic.roundoff
    error = np.where((digits == np.rint(digits)) | np.isnan(value), 0, abs(value) * arithmetic.roundoff)
    return Bounded(value, error, arithmetic)


def may_vanish(a: Bounded) -> np.ndarray:
    """Where the computed value may be 0, or of the other sign, though the exact one is not, or the other way round."""
    return (a.error > 0) & (abs(a.value) <= a.error) & ~(a.least > 0)


def rounded(
    value: np.ndarray,
    error: np.ndarray,
    operands: Sequence[Bounded],
    steps: float | np.ndarray,
    unknown: np.ndarray | bool = False,
    terms: Callable[[], Terms] | None = None,
) -> Bounded:
    """The result of one elementary step: `error` inherited from its operands, and `steps` roundings of its own.

    A 0 that no error reaches, as the difference of equal inputs, is 0 in every arithmetic: clamps at 0 hang on it.
    """
    arithmetic = operands[0].arithmetic
    unknown = np.broadcast_to(unknown, np.shape(value))
    for operand in operands:
        unknown = unknown | np.isinf(operand.error)
    own = REORDERING * steps * arithmetic.roundoff * (abs(value) + error) + arithmetic.smallest_normal
    error = np.where((value == 0) & (error == 0), 0, error + own)
    unknown = unknown | (np.isfinite(value) & ~(abs(value) + error <= arithmetic.largest))
    error = np.where(unknown, np.inf, np.where(np.isfinite(value), error, 0.0))
    return Bounded(value, error, arithmetic, terms=terms)


def add(a: Bounded, b: Bounded) -> Bounded:
    """a + b."""
    return rounded(a.value + b.value, a.error + b.error, (a, b), ROUNDED_ONCE, terms=lambda: a.terms + b.terms)


def subtract(a: Bounded, b: Bounded) -> Bounded:
    """a - b."""
    return rounded(a.value - b.value, a.error + b.error, (a, b), ROUNDED_ONCE, terms=lambda: a.terms + b.terms)


def multiply(a: Bounded, b: Bounded) -> Bounded:
    """a b."""
    error = abs(a.value) * b.error + abs(b.value) * a.error + a.error * b.error
    unknown = (np.isinf(a.value) & may_vanish(b)) | (np.isinf(b.value) & may_vanish(a))
    return rounded(a.value * b.value, error, (a, b), ROUNDED_ONCE, unknown, lambda: a.terms * b.terms)


def divide(a: Bounded, b: Bounded) -> Bounded:
    """a / b; nothing is known where the computed divisor may be 0 though the exact one is not, or the reverse."""
    value = a.value / b.value
    error = (a.error + abs(value) * b.error) / (abs(b.value) - b.error)
    # Of a divisor that is known to be above 0 the lower end may be nearer than its error.
    nearest, farthest = b.least, b.value + b.error
    below = (a.error + abs(value) * (b.value - nearest)) / nearest
    above = (a.error + abs(value) * b.error) / farthest
    error = np.where(nearest > b.value - b.error, np.maximum(below, above), error)
    # By a power of 2 it is exact, be it as a product with the reciprocal.
    scaling = (b.error == 0) & (abs(np.frexp(b.value)[0]) == 0.5)
    steps = np.where(scaling, 0.0, DIVISION)
    return rounded(value, error, (a, b), steps, may_vanish(b) | (may_vanish(a) & (b.value == 0)))


def negative(a: Bounded) -> Bounded:
    """-a, exactly."""
    return Bounded(-a.value, a.error, a.arithmetic)


def exp(a: Bounded) -> Bounded:
    """e^a; an error of a is a relative one of the result."""
    value = np.exp(a.value)
    inherited = np.where(a.error < 1, value * np.expm1(a.error), np.exp(a.value + a.error) - value)
    # An argument of -inf has no error, and its 0 none to be multiplied with.
    exponent = np.where(value > 0, EXPONENT * a.arithmetic.roundoff * abs(a.value) * value, 0)
    return rounded(value, inherited + exponent, (a,), EXPONENTIAL)


def sqrt(a: Bounded) -> Bounded:
    """The square root: ``sqrt(x) - sqrt(y) = (x - y) / (sqrt(x) + sqrt(y))``; nothing is known where NaN may result."""
    value, nearest = np.sqrt(a.value), np.sqrt(a.least)
    inherited = np.maximum((a.value - a.least) / (value + nearest), a.error / (value + np.sqrt(a.value + a.error)))
    inherited = np.where(a.error == 0, 0.0, inherited)
    result = rounded(value, inherited, (a,), ROUNDED_ONCE, (a.error > 0) & (a.least < 0))
    return Bounded(result.value, result.error, a.arithmetic, nearest * (1 - REORDERING * a.arithmetic.roundoff))


def extremum(choose: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Bounded, Bounded], Bounded]:
    """Maximum or minimum: no rounding; the error is that of the operand which wins for certain, else the larger."""

    def rule(a: Bounded, b: Bounded) -> Bounded:
        value = choose(a.value, b.value)
        apart = abs(a.value - b.value) > a.error + b.error
        of_winner = np.where(value == a.value, a.error, b.error)
        error = np.where(apart, of_winner, np.maximum(a.error, b.error))
        unknown = np.isinf(a.error) | np.isinf(b.error)
        least = choose(a.least, b.least)

        def terms() -> Terms:
            # No step is moved past the choice: from here on the number stands for itself.
            return Terms.of(value, a.terms.exact(a.arithmetic) & b.terms.exact(a.arithmetic))

        return Bounded(value, np.where(np.isfinite(value) | unknown, error, 0.0), a.arithmetic, least, terms)

    return rule


def comparison(compare: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Bounded, Bounded], Verdict]:
    """A comparison; uncertain where the operands are no farther apart than their errors, unless both are exact."""

    def rule(a: Bounded, b: Bounded) -> Verdict:
        margin = a.error + b.error
        # Nothing compares with a NaN, whatever the other operand's error.
        decided = (np.isnan(a.value) & (a.error == 0)) | (np.isnan(b.value) & (b.error == 0))
        uncertain = (margin > 0) & ~(abs(a.value - b.value) > margin) & ~decided
        if uncertain.any():
            uncertain &= ~(a.terms.exact(a.arithmetic) & b.terms.exact(a.arithmetic))
        return Verdict(compare(a.value, b.value), uncertain, a.arithmetic)

    return rule


def where(condition: Verdict | np.ndarray, a: Any, b: Any) -> Bounded:
    """numpy.where; where the condition is uncertain, either choice is admitted."""
    arithmetic = next(x.arithmetic for x in (condition, a, b) if isinstance(x, Bounded | Verdict))
    a, b = lift(a, arithmetic), lift(b, arithmetic)
    if not isinstance(condition, Verdict):
        condition = Verdict(condition, np.zeros_like(condition, dtype=bool), arithmetic)
    value = np.where(condition.outcome, a.value, b.value)
    error = np.where(condition.outcome, a.error, b.error)
    either = np.maximum(a.error, b.error) + abs(a.value - b.value)
    error = np.where(condition.uncertain, np.where(np.isnan(either), np.inf, either), error)
    return Bounded(value, error, arithmetic)


def total(a: Bounded, axis: Any = None, keepdims: bool = False) -> Bounded:
    """numpy.sum in any order that `summation_growth` admits."""
    value = np.sum(a.value, axis=axis, keepdims=keepdims)
    inherited = np.sum(a.error, axis=axis, keepdims=keepdims)
    terms = a.value.size // max(np.size(value), 1)
    if terms == 1:
        return Bounded(value, inherited, a.arithmetic)
    magnitude = np.sum(abs(a.value) + a.error, axis=axis, keepdims=keepdims)
    grown = summation_growth(terms) * a.arithmetic.roundoff * magnitude
    # Some orders pass through the sum of all terms of one sign.
    overflows = np.isfinite(magnitude) & ~(magnitude + grown <= a.arithmetic.largest)
    return rounded(value, inherited + grown, (Bounded(value, inherited, a.arithmetic),), ROUNDED_ONCE, overflows)


def exponent_field(size: np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
    """Magnitudes for which tensor cores take those of half types: a subnormal number has the smallest normal exponent.

    Seen on compute capability 9.0: the sum of 2^-14 and 2^-28 loses the latter beside 2^15 times the smallest subnormal
    float16, 2^-24, and not beside 2^15 times 0, or 2^-9 from normal factors.
    """
    if arithmetic.storage is None:
        return size
    smallest = arithmetic.storage.smallest_normal
    return np.where((size > 0) & (size < smallest), smallest, size)


def matrix_product(a: Bounded, b: Bounded) -> Bounded:
    """a @ b of two matrices, the products and sums in any order that `summation_growth` admits.

    Tensor cores align the products of a step to the largest and cut off what lies below its last digits, which costs up
    to twice as much as rounding to nearest; where a factor is subnormal, as much as if it were not.

    Source: Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ Computer Science 2021.
    """
    if a.ndim != 2 or b.ndim != 2:
        raise TypeError("there is a rule for the product of two matrices only")
    arithmetic, terms = a.arithmetic, a.shape[1]
    size_a, error_a, size_b, error_b = (
        np.where(np.isfinite(part), part, 0) for part in (abs(a.value), a.error, abs(b.value), b.error)
    )
    value = a.value @ b.value
    inherited = error_a @ (size_b + error_b) + size_a @ error_b
    magnitude = exponent_field(size_a, arithmetic) @ exponent_field(size_b, arithmetic) + inherited
    grown = CUT_OFF * (summation_growth(terms) + 1) * arithmetic.roundoff * magnitude
    grown = grown + np.where(magnitude > 0, terms * arithmetic.smallest_normal, 0)
    # As for a sum, some orders pass through the sum of all terms of one sign; infinite terms do not undo that.
    unknown = ~(magnitude + grown <= arithmetic.largest)
    unknown |= np.isinf(a.error).any(axis=1)[:, None] | np.isinf(b.error).any(axis=0)[None, :]
    # An infinite element times one of which it is not known whether it is 0.
    unknown |= (np.isinf(a.value).astype(int) @ may_vanish(b).astype(int)) > 0
    unknown |= (may_vanish(a).astype(int) @ np.isinf(b.value).astype(int)) > 0
    error = inherited + grown
    return rounded(value, error, (Bounded(value, error, arithmetic),), ROUNDED_ONCE, unknown)


def stored(a: Any) -> Any:
    """`a` rounded to the type in which results are kept, as a step costs that passes through memory or a tensor core.

    Plain arrays, and arithmetics whose results are kept as they are computed, pass unchanged.
    """
    if not isinstance(a, Bounded) or a.arithmetic.storage is None:
        return a
    storage = a.arithmetic.storage
    with np.errstate(all="ignore"):
        smallest = 2 * storage.roundoff * storage.smallest_normal
        spacing = np.maximum(np.ldexp(storage.roundoff, np.frexp(a.value)[1]), smallest)
        exact = (a.error == 0) & ((a.value / spacing == np.rint(a.value / spacing)) | ~np.isfinite(a.value))
        magnitude = abs(a.value) + a.error
        error = a.error + storage.roundoff * np.maximum(magnitude, storage.smallest_normal)
        error = np.where(magnitude <= storage.largest, error, np.inf)
        return Bounded(a.value, np.where(exact, 0, error), a.arithmetic)


def largest(a: Bounded, axis: Any = None, keepdims: bool = False, initial: float = -np.inf) -> Bounded:
    """numpy.max: no rounding; the error is at most the largest of all."""
    value = np.max(a.value, axis=axis, keepdims=keepdims, initial=initial)
    error = np.max(a.error, axis=axis, keepdims=keepdims, initial=0)
    return Bounded(value, np.where(np.isfinite(value) | np.isinf(error), error, 0), a.arithmetic)


def stack(arrays: Sequence[Bounded], axis: int = 0) -> Bounded:
    """numpy.stack."""
    return Bounded(
        np.stack([a.value for a in arrays], axis), np.stack([a.error for a in arrays], axis), arrays[0].arithmetic
    )


def transpose(a: Bounded) -> Bounded:
    """numpy.transpose of a matrix."""
    return Bounded(a.value.T, a.error.T, a.arithmetic)


def broadcast_to(a: Bounded, shape: tuple[int, ...]) -> Bounded:
    """numpy.broadcast_to."""
    return Bounded(np.broadcast_to(a.value, shape), np.broadcast_to(a.error, shape), a.arithmetic)


def zeros_like(a: Bounded) -> Bounded:
    """numpy.zeros_like: exact zeros."""
    return Bounded.exact(np.zeros_like(a.value), a.arithmetic)


def count_nonzero(verdict: Verdict) -> int:
    """numpy.count_nonzero of a comparison."""
    return int(np.count_nonzero(certain(verdict)))


UFUNCS: dict[str, Callable] = {
    "add": add,
    "subtract": subtract,
    "multiply": multiply,
    "divide": divide,
    "matmul": matrix_product,
    "negative": negative,
    "exp": exp,
    "sqrt": sqrt,
    "maximum": extremum(np.maximum),
    "minimum": extremum(np.minimum),
    "equal": comparison(np.equal),
    "less": comparison(np.less),
    "less_equal": comparison(np.less_equal),
    "greater": comparison(np.greater),
    "greater_equal": comparison(np.greater_equal),
}
FUNCTIONS: dict[str, Callable] = {
    "where": where,
    "sum": total,
    "max": largest,
    "stack": stack,
    "transpose": transpose,
    "broadcast_to": broadcast_to,
    "zeros_like": zeros_like,
    "count_nonzero": count_nonzero,
}
