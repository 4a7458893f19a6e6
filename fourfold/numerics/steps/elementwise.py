"""The rules of running error analysis for NumPy's elementwise functions.

Each rule returns the exact value of its step with a bound: the error inherited from the operands, and the roundings
that the step adds. To cover another function, decorate a function here with ``@rule_for``, and return an
`elementary_step`.
The rules of sums, products of matrices and moved elements are in `fourfold.numerics.steps.along_axes`.

Sources: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, sections 2.2 (the standard model)
and 3.3 (running error analysis). CUDA Programming Guide 13, Mathematical Functions: the errors of the functions that
CUDA C++ calls, and Triton through libdevice, unless fast ones are requested.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fourfold.numerics.bounded import Arithmetic, Bounded, Comparison, Terms, lift, rule_for, truth


def units(ulps: float) -> float:
    """Return the units of roundoff of a function documented to be within `ulps` of the correctly rounded result."""
    return 2.0 * ulps + 1.0


# Errors of the elementary steps in units of roundoff. Additions and products are rounded once. Division is the least
# exact that a GPU language emits by default (PTX div.full.f32: 2 ulp, that is 4 units).
ROUNDED_ONCE = 1.0
DIVISION = 4.0
# An exponential of 2 ulp, and the two roundings of its argument if it is computed as 2^(x log2(e)): those of the
# constant and of the product, each of them about |x| units in the result. CUDA documents 2 + 1.173 |x| ulp
# for its __expf, and an ulp is two units.
# The maximum of a softmax must be subtracted before that product: afterwards the error grows with the inputs' offset.
EXPONENTIAL = 4.0
EXPONENT = 2.35
# The errors of CUDA's logf, log2f, log1pf and expm1f; of exp2f, sinf, cosf, tanhf and atanf; and of powf, in single
# precision. In double precision they are no larger.
WITHIN_1_ULP, WITHIN_2_ULP, POWER = units(1), units(2), units(4)
# In units of roundoff: above 1 an ulp is two of them.
TWO_ULP_OF_1 = 4.0
LOG_2 = float(np.log(2))
# The number of roundings a correct kernel may spend in place of one of the oracle's: it may order its steps
# differently (a reciprocal computed once, a fused multiply-add, a factor moved out of a sum). 1 would be the standard
# model of the oracle's own steps. 4 is a choice, not a derivation, and safe on both sides. In float32, over generated
# cases, the worst errors of right formulas (eager, by reciprocals, regrouped, with Chan's updates, by exp2, by
# log-sum-exp), forward and backward, in units of the bound:
#
#                   1     2     4     8
#     giou         0.45  0.25  0.13  0.07
#     layer_norm   0.49  0.33  0.20  0.15
#     softmax      0.33  0.23  0.14  0.08
#     matmul       0.26  0.23  0.20  0.15   where no sign depends on rounding
#
# With half of it, none of these would be rejected, nor any of the right kernels to which the known-wrong ones are
# compared. With twice, and with 256, the 132 known-wrong kernels in torch whose values are wrong are all still
# rejected; with 65536 three pass.
REORDERING = 4.0


def may_vanish(a: Bounded) -> np.ndarray:
    """Return where the computed value may be 0, or of the other sign, though the exact one is not, or the reverse."""
    covers_zero = abs(a.value) <= a.error
    return covers_zero & (a.error > 0) & ~(a.least > 0) if covers_zero.any() else covers_zero


def elementary_step(
    value: np.ndarray,
    error: np.ndarray,
    operands: Sequence[Bounded],
    steps: float | np.ndarray,
    unknown: np.ndarray | None = None,
    terms: Callable[[], Terms] | None = None,
    settled: Callable[[], np.ndarray] | None = None,
) -> Bounded:
    """Return the result of one elementary step: `error` inherited from its operands, and `steps` roundings of its own.

    An unknown operand has an infinite or NaN `error`, or makes `value` not finite; the result is then unknown. A 0
    without any error, such as the difference of equal inputs, is 0 in every arithmetic: clamps at 0 depend on it.
    """
    arithmetic = operands[0].arithmetic
    size = abs(value)
    reach = size + error
    error = error + (REORDERING * steps * arithmetic.roundoff * reach + arithmetic.smallest_normal)
    is_finite = size + error <= arithmetic.largest
    if not is_finite.all():
        # The class of a value that is not finite is certain, unless an operand is unknown.
        certain = ~np.isfinite(value)
        for operand in operands:
            certain = certain & ~np.isinf(operand.error)
        error = np.where(is_finite, error, np.where(certain, 0.0, np.inf))
    if not reach.all():
        error = np.where(reach == 0, 0.0, error)
    if unknown is not None:
        error = np.where(unknown, np.inf, error)
    return Bounded(value, error, arithmetic, terms=terms, settled=settled)


# The largest error of the reference itself for a sum of inputs, in units of roundoff.
DIGITS_LACKING = 1 / 64


def once(value: np.ndarray, a: Bounded, b: Bounded) -> Callable[[], np.ndarray]:
    """Return the error of one step of two inputs, beyond the rounding of the result, which is all that it may cost.

    For half types the step is rounded to the arithmetic first. That changes no result, as the arithmetic has more than
    twice their digits (Figueroa, When is double rounding innocuous?, SIGNUM Newsletter 30, 1995).
    """

    def error() -> np.ndarray:
        arithmetic = a.arithmetic
        lacking = DIGITS_LACKING * arithmetic.roundoff * abs(value) + arithmetic.smallest_normal
        return np.where((a.error == 0) & (b.error == 0) & np.isfinite(value), lacking, np.inf)

    return error


def exact_sum_error(terms: Terms, arithmetic: Arithmetic) -> np.ndarray:
    """Return the error of a sum that is exact in any order: a few roundings, independent of the number of terms.

    They allow for a formula of the same value that is rounded at its end, like the square of a norm.
    """
    return np.where(terms.exact(arithmetic), REORDERING * arithmetic.roundoff * terms.reach, np.inf)


def set_least(result: Bounded, limit: np.ndarray | float) -> Bounded:
    """Set a lower bound of the step's computed results, where it is tighter than the error, and return the result."""
    result.limit = np.fmax(result.least, limit)
    return result


def saturating_step(result: Bounded, inherited: np.ndarray) -> Bounded:
    """Return the result of erf or tanh, with a step of 2 ulp and no reordering where it is within a quarter unit of ±1.

    Nothing can be reordered there: the amount that such formulas subtract from 1, ``q(x) e^(-x^2)`` or ``2 / (1 +
    e^2x)``, is less than half a unit even if it is twice too large, so that the difference is rounded to ±1. There
    remain clamped approximations and the quotient ``(e^2x - 1) / (e^2x + 1)`` of equal numbers, which end within 2 ulp
    of 1.

    Args:
        result: with the bound that applies elsewhere, which is 5 times as wide.
        inherited: the part of the bound that comes from the argument's error.
    """
    near = 1 - abs(result.value) <= result.arithmetic.roundoff / 4
    if near.any():
        error = inherited + TWO_ULP_OF_1 * result.arithmetic.roundoff
        result.error = np.where(near, np.fmin(result.error, error), result.error)
    return result


def flush_error(a: Bounded) -> np.ndarray:
    """Return the error of `a` if subnormal numbers are read as 0, as in Triton's roots, logs and powers (.ftz)."""
    size = abs(a.value)
    subnormal = (size > 0) & (size < a.arithmetic.smallest_normal)
    return np.where(subnormal, np.maximum(a.error, size), a.error)


# Sums, products and quotients.


@rule_for(np.add)
def add(a: Bounded, b: Bounded) -> Bounded:
    """Return a + b, rounded once. The operands' lower limits add up to one of the sum, except for the roundings."""
    value = a.value + b.value
    result = elementary_step(
        value, a.error + b.error, (a, b), ROUNDED_ONCE, terms=lambda: a.terms + b.terms, settled=once(value, a, b)
    )
    if a.limit is None and b.limit is None:
        return result
    limit = a.least + b.least
    return set_least(result, np.where(limit > 0, limit * (1 - REORDERING * a.arithmetic.roundoff), -np.inf))


@rule_for(np.subtract)
def subtract(a: Bounded, b: Bounded) -> Bounded:
    """Return a - b, rounded once."""
    value = a.value - b.value
    return elementary_step(
        value, a.error + b.error, (a, b), ROUNDED_ONCE, terms=lambda: a.terms + b.terms, settled=once(value, a, b)
    )


@rule_for(np.multiply)
def multiply(a: Bounded, b: Bounded) -> Bounded:
    """Return a b, rounded once; the error includes both operands' errors and their product."""
    error = abs(a.value) * b.error + abs(b.value) * a.error + a.error * b.error
    value, unknown = a.value * b.value, None
    if not np.isfinite(value).all():
        unknown = (np.isinf(a.value) & may_vanish(b)) | (np.isinf(b.value) & may_vanish(a))
    return elementary_step(value, error, (a, b), ROUNDED_ONCE, unknown, lambda: a.terms * b.terms, once(value, a, b))


@rule_for(np.square)
def square(a: Bounded) -> Bounded:
    """Return a a, which is never below 0."""
    return set_least(multiply(a, a), 0.0)


@rule_for(np.divide)
def divide(a: Bounded, b: Bounded) -> Bounded:
    """Return a / b; it is unknown where the computed divisor may be 0 though the exact one is not, or the reverse."""
    value = a.value / b.value
    inherited = a.error + abs(value) * b.error
    error = inherited / (abs(b.value) - b.error)
    if b.limit is not None:
        # The lower limit of a divisor that is known to be above 0 may be tighter than its error.
        loss = (a.error + abs(value) * (b.value - b.limit)) / b.limit
        change = np.maximum(loss, inherited / (b.value + b.error))
        error = np.where(b.limit > b.value - b.error, change, error)
    steps: float | np.ndarray = DIVISION
    if not b.error.all():
        # Division by a power of 2 is exact, even as a product with the reciprocal.
        steps = np.where((b.error == 0) & (abs(np.frexp(b.value)[0]) == 0.5), 0.0, DIVISION)
    unknown = may_vanish(b)
    if not b.value.all():
        unknown = unknown | (may_vanish(a) & (b.value == 0))
    result = elementary_step(value, error, (a, b), steps, unknown)
    return result if a.limit is None else set_least(result, np.where((a.limit >= 0) & (b.least >= 0), 0.0, -np.inf))


@rule_for(np.reciprocal)
def reciprocal(a: Bounded) -> Bounded:
    """Return 1 / a."""
    return divide(Bounded.exact(np.ones((), a.dtype), a.arithmetic), a)


@rule_for(np.negative)
def negative(a: Bounded) -> Bounded:
    """Return -a, exactly."""
    return Bounded(-a.value, a.error.copy(), a.arithmetic)


@rule_for(np.positive)
def positive(a: Bounded) -> Bounded:
    """Return a copy."""
    return a.copy()


# Elementary functions.


@rule_for(np.exp)
def exp(a: Bounded) -> Bounded:
    """Return e^a; an absolute error of a becomes a relative error of the result."""
    value = np.exp(a.value)
    inherited = np.where(a.error < 1, value * np.expm1(a.error), np.exp(a.value + a.error) - value)
    # An argument of -inf has no error, and its result 0 no relative error.
    exponent = np.where(value > 0, EXPONENT * a.arithmetic.roundoff * abs(a.value) * value, 0)
    return elementary_step(value, inherited + exponent, (a,), EXPONENTIAL)


@rule_for(np.exp2)
def exp2(a: Bounded) -> Bounded:
    """Return 2^a, within 2 ulp: ``2^(x + e) - 2^x = 2^x expm1(e log 2)``."""
    value = np.exp2(a.value)
    growth = a.error * LOG_2
    inherited = np.where(growth < 1, value * np.expm1(growth), np.exp2(a.value + a.error) - value)
    return elementary_step(value, inherited, (a,), WITHIN_2_ULP)


@rule_for(np.expm1)
def expm1(a: Bounded) -> Bounded:
    """Return e^a - 1, within 1 ulp of that difference: ``e^(x + e) - e^x = e^x expm1(e)``."""
    power = np.exp(a.value)
    inherited = np.where(a.error < 1, power * np.expm1(a.error), np.exp(a.value + a.error) - power)
    return elementary_step(np.expm1(a.value), inherited, (a,), WITHIN_1_ULP)


def logarithm(function: np.ufunc, unit: float, shift: float) -> Callable[[Bounded], Bounded]:
    """Return the rule of a logarithm of ``a + shift``, within 1 ulp.

    The error is ``log(x) - log(x - e) = -log1p(-e / x)``, the larger of both sides. The result is unknown where a
    computed argument may be negative, 0, or subnormal and therefore read as 0.
    """

    def rule(a: Bounded) -> Bounded:
        argument, error = a.value + shift, a.error if shift else flush_error(a)
        nearest = argument - error
        if a.limit is not None:
            nearest = np.where(error > a.error, nearest, a.limit + shift)
        sides = np.maximum(-np.log1p((nearest - argument) / argument), np.log1p(error / argument)) / unit
        unknown = (error > 0) & (nearest < a.arithmetic.smallest_normal) & (argument + error >= 0)
        return elementary_step(function(a.value), np.where(error == 0, 0.0, sides), (a,), WITHIN_1_ULP, unknown)

    return rule


rule_for(np.log)(logarithm(np.log, unit=1.0, shift=0.0))
rule_for(np.log2)(logarithm(np.log2, unit=LOG_2, shift=0.0))
rule_for(np.log1p)(logarithm(np.log1p, unit=1.0, shift=1.0))


@rule_for(np.sqrt)
def sqrt(a: Bounded) -> Bounded:
    """Return the square root: ``sqrt(x) - sqrt(y) = (x - y) / (sqrt(x) + sqrt(y))``; it is unknown where it may be NaN.

    A subnormal argument may be read as 0.
    """
    value, nearest = np.sqrt(a.value), np.sqrt(a.least)
    inherited = np.maximum((a.value - a.least) / (value + nearest), a.error / (value + np.sqrt(a.value + a.error)))
    inherited = np.where(a.error == 0, 0.0, inherited)
    subnormal = a.least < a.arithmetic.smallest_normal
    inherited = np.where(subnormal, np.fmax(inherited, value), inherited)
    # The argument may have overflowed, though it is known to be above 0.
    inherited = np.where(np.isinf(a.error), np.inf, inherited)
    result = elementary_step(
        value, inherited, (a,), ROUNDED_ONCE, (flush_error(a) > 0) & (a.least < 0) & (a.value + a.error >= 0)
    )
    result.limit = np.where(subnormal, 0.0, nearest * (1 - REORDERING * a.arithmetic.roundoff))
    return result


@rule_for(np.tanh)
def tanh(a: Bounded) -> Bounded:
    """Return the hyperbolic tangent, within 2 ulp.

    ``tanh(x) - tanh(x - e) = tanh(e) (1 - tanh(x) tanh(x - e))``, largest on the side of 0, where the slope is
    steepest.
    """
    value, nearest = np.tanh(a.value), np.tanh(abs(a.value) - a.error)
    inherited = np.tanh(a.error) * (1 - abs(value) * nearest)
    return saturating_step(elementary_step(value, inherited, (a,), WITHIN_2_ULP), inherited)


@rule_for(np.arctan)
def arctan(a: Bounded) -> Bounded:
    """Return the arc tangent, within 2 ulp.

    ``atan(x) - atan(x - e) = atan2(e, 1 + x (x - e))``, largest on the side of 0, where the slope is steepest.
    """
    size = abs(a.value)
    inherited = np.where(a.error == 0, 0.0, np.arctan2(a.error, 1 + size * (size - a.error)))
    return elementary_step(np.arctan(a.value), inherited, (a,), WITHIN_2_ULP)


def wave(function: np.ufunc, slope: np.ufunc) -> Callable[[Bounded], Bounded]:
    """Return the rule of sine or cosine, within 2 ulp.

    ``sin(x + e) - sin(x) = 2 sin(e / 2) cos(x + e / 2)``, and ``|cos(x + d)| <= |cos(x)| + |sin(x)| sin(d)``.
    """

    def rule(a: Bounded) -> Bounded:
        value, half = function(a.value), np.sin(np.minimum(a.error, np.pi) / 2)
        steepest = np.minimum(abs(slope(a.value)) + abs(value) * half, 1)
        return elementary_step(value, 2 * half * steepest, (a,), WITHIN_2_ULP)

    return rule


rule_for(np.sin)(wave(np.sin, np.cos))
rule_for(np.cos)(wave(np.cos, np.sin))


@rule_for(np.power)
def power(a: Bounded, b: Bounded) -> Bounded:
    """Return a^b, within 4 ulp or by repeated products: ``(x + e)^p - x^p = x^p expm1(p log1p(e / x))``.

    The error of an exponent enters as ``x^d - 1 = expm1(d log x)``. The result is unknown where a base that may be 0
    has a negative exponent, or where a base that may be negative has a fractional one, as a root may be NaN.
    """
    if b.ndim == 0 and b.error == 0 and b.value in (1, 2):
        return positive(a) if b.value == 1 else square(a)
    value, size, error, exponent = np.power(a.value, b.value), abs(a.value), flush_error(a), b.value
    is_integer = (b.error == 0) & (exponent == np.rint(exponent)) & np.isfinite(exponent)
    nearest = size - error
    ends = (value * np.expm1(exponent * np.log1p(end / size)) for end in (error, -error))
    inherited = np.where(size == 0, np.power(error, exponent), np.fmax(*map(abs, ends)))
    inherited = np.where(error == 0, 0.0, inherited)
    # A whole power of a base of uncertain sign changes most at the far end; a root of the base may be NaN.
    diverges = ~is_integer & (nearest <= 0) & ((a.value < 0) | (nearest < 0))
    unknown = (error > 0) & np.where(exponent < 0, nearest <= 0, diverges)
    if b.error.any():
        span = np.maximum(abs(np.log(nearest)), abs(np.log(size + error)))
        shifted = (abs(value) + inherited) * np.expm1(b.error * span)
        inherited = inherited + np.where((b.error == 0) | ((value == 0) & (inherited == 0)), 0.0, shifted)
    products = abs(exponent) - 1 + np.where(exponent < 0, DIVISION, 0.0)
    return elementary_step(value, inherited, (a, b), np.where(is_integer, np.maximum(products, POWER), POWER), unknown)


# Choices.


@rule_for(np.absolute, np.fabs)
def absolute(a: Bounded) -> Bounded:
    """Return the magnitude, exactly: magnitudes are no farther apart than the numbers are."""
    result = Bounded(abs(a.value), a.error.copy(), a.arithmetic, terms=lambda: standing(abs(a.value), a))
    return set_least(result, 0.0)


@rule_for(np.sign)
def sign(a: Bounded) -> Bounded:
    """Return -1, 0 or 1, with an error that admits either where the comparison with 0 is uncertain.

    The result is unknown where `a` is.
    """
    value = np.sign(a.value)
    error = np.where((a != 0.0).uncertain, 1 + abs(value), 0.0)
    return Bounded(value, np.where(np.isinf(a.error), np.inf, error), a.arithmetic)


def standing(value: np.ndarray, *operands: Bounded) -> Terms:
    """Return the terms of a value chosen among its operands: the value itself, as no step moves past the choice."""
    exact = operands[0].terms.exact(operands[0].arithmetic)
    for operand in operands[1:]:
        exact = exact & operand.terms.exact(operand.arithmetic)
    return Terms.of(value, exact)


def extremum(choose: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Bounded, Bounded], Bounded]:
    """Return the rule of maximum or minimum: no rounding.

    The error is that of the operand that certainly wins, else the larger one.
    """

    def rule(a: Bounded, b: Bounded) -> Bounded:
        value = choose(a.value, b.value)
        separate = abs(a.value - b.value) > a.error + b.error
        of_winner = np.where(value == a.value, a.error, b.error)
        error = np.where(separate, of_winner, np.maximum(a.error, b.error))
        finite = np.isfinite(value)
        if not finite.all():
            error = np.where(finite | np.isinf(a.error) | np.isinf(b.error), error, 0.0)

        def settled() -> np.ndarray:
            first, second = a.settled, b.settled
            return np.where(separate, np.where(value == a.value, first, second), np.maximum(first, second))

        return Bounded(value, error, a.arithmetic, choose(a.least, b.least), lambda: standing(value, a, b), settled)

    return rule


maximum, minimum = extremum(np.maximum), extremum(np.minimum)
rule_for(np.maximum)(maximum)
rule_for(np.minimum)(minimum)


def arithmetic_of(*operands: Any) -> Any:
    """Return the arithmetic of the first bounded operand."""
    return next(x.arithmetic for x in operands if isinstance(x, Bounded | Comparison))


@rule_for(np.clip)
def clip(a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Bounded:
    """Return the minimum of the upper limit and the maximum of `a` and the lower limit."""
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    arithmetic = arithmetic_of(a, low, high)
    result = lift(a, arithmetic)
    if low is not None:
        result = maximum(result, lift(low, arithmetic))
    return result if high is None else minimum(result, lift(high, arithmetic))


@rule_for(np.where)
def where(condition: Any, x: Any, y: Any) -> Bounded:
    """Return numpy.where; both choices are admitted where the condition is uncertain."""
    arithmetic = arithmetic_of(condition, x, y)
    condition, a, b = truth(condition, arithmetic), lift(x, arithmetic), lift(y, arithmetic)
    value = np.where(condition.outcome, a.value, b.value)
    error = np.where(condition.outcome, a.error, b.error)
    if condition.uncertain.any():
        loser_error = np.where(condition.outcome, b.error, a.error)
        hull = np.maximum(error, np.where(a.value == b.value, 0.0, abs(a.value - b.value)) + loser_error)
        error = np.where(condition.uncertain, np.where(np.isnan(hull), np.inf, hull), error)

    def settled() -> np.ndarray:
        return np.where(condition.uncertain, np.inf, np.where(condition.outcome, a.settled, b.settled))

    result = Bounded(value, error, arithmetic, settled=settled)
    if a.limit is None and b.limit is None:
        return result
    return set_least(result, np.minimum(*np.broadcast_arrays(a.least, b.least)))


# Comparisons and logical functions.


def comparison(compare: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Bounded, Bounded], Comparison]:
    """Return the rule of a comparison.

    It is uncertain where the operands are no farther apart than their errors, unless both are exact.
    """

    def rule(a: Bounded, b: Bounded) -> Comparison:
        margin = a.error + b.error
        uncertain = (margin > 0) & ~(abs(a.value - b.value) > margin)
        if uncertain.any():
            # A comparison with NaN has a certain outcome, whatever the other operand's error.
            decided = (np.isnan(a.value) & (a.error == 0)) | (np.isnan(b.value) & (b.error == 0))
            uncertain &= ~(decided | (a.terms.exact(a.arithmetic) & b.terms.exact(a.arithmetic)))
        return Comparison(compare(a.value, b.value), uncertain, a.arithmetic)

    return rule


for _compare in (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal):
    rule_for(_compare)(comparison(_compare))


def class_rule(test: np.ufunc) -> Callable[[Bounded], Comparison]:
    """Return the rule for whether a number is NaN, infinite or finite: certain, unless the number is unknown."""
    return lambda a: Comparison(test(a.value), np.isinf(a.error), a.arithmetic)


for _test in (np.isnan, np.isinf, np.isfinite):
    rule_for(_test)(class_rule(_test))


@rule_for(np.logical_and, np.bitwise_and, operand=truth)
def conjunction(a: Comparison, b: Comparison) -> Comparison:
    """Return a and b: certain where both operands are, or where one is certainly false."""
    possible = (a.outcome | a.uncertain) & (b.outcome | b.uncertain)
    return Comparison(a.outcome & b.outcome, possible & (a.uncertain | b.uncertain), a.arithmetic)


@rule_for(np.logical_or, np.bitwise_or, operand=truth)
def disjunction(a: Comparison, b: Comparison) -> Comparison:
    """Return a or b: certain where both operands are, or where one is certainly true."""
    settled = (a.outcome & ~a.uncertain) | (b.outcome & ~b.uncertain)
    return Comparison(a.outcome | b.outcome, ~settled & (a.uncertain | b.uncertain), a.arithmetic)


@rule_for(np.logical_xor, np.bitwise_xor, operand=truth)
def exclusive_or(a: Comparison, b: Comparison) -> Comparison:
    """Return a xor b: certain where both operands are."""
    return Comparison(a.outcome ^ b.outcome, a.uncertain | b.uncertain, a.arithmetic)


@rule_for(np.logical_not, np.invert, operand=truth)
def negation(a: Comparison) -> Comparison:
    """Return not a: as certain as a."""
    return Comparison(~a.outcome, a.uncertain, a.arithmetic)
