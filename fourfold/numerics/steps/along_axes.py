"""The rules of running error analysis for functions along axes: sums, extremes, products of matrices, and moves.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, sections 3.1 (products), 3.5
(products of matrices) and 4.2 (sums).
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fourfold.numerics.bounded import (
    RULES,
    Arithmetic,
    Bounded,
    Comparison,
    HangsOnRounding,
    NoRule,
    Rule,
    Terms,
    certain,
    lift,
    rule_for,
    truth,
)
from fourfold.numerics.steps.elementwise import (
    ROUNDED_ONCE,
    arithmetic_of,
    divide,
    elementary_step,
    exact_sum_error,
    may_vanish,
    multiply,
    set_least,
    sqrt,
    square,
    subtract,
)
from fourfold.numerics.steps.orders import partial_products

# A tensor core truncates instead of rounding to nearest: an error of up to one ulp, two roundings.
CUT_OFF = 2.0
# Sums of up to this many terms may be computed sequentially; longer ones must be blocked or pairwise. The limit is
# 1 / sqrt(roundoff) of float32. There the worst case, one roundoff per term, costs half of the digits, and is as large
# as one of n equal terms: a bound that grew further would not detect a term left out. The limit could be larger in
# float64, but no kernel needs it.
#
# The worst case is rare, except for equal terms, which are all rounded to the same side. Summed sequentially, they have
# errors of 0.23 n roundoffs of their sum: 935 of the bound's 4099 at 4096 terms, 3560 of 4356 at 16384, and 16299 of
# 4612 at 65536, which is rejected. Random terms have 60 at 16384, and 134 at 65536. With half the limit, the sum of
# 16384 equal terms would be rejected, too; with twice the limit, none of the others here would be accepted.
SEQUENTIAL_TERMS = 4096


def summation_growth(terms: int | np.ndarray) -> np.ndarray:
    """Return the growth of the error of sums, in roundoffs of the sum of magnitudes.

    Args:
        terms: the number of terms of each sum.

    Any order of up to `SEQUENTIAL_TERMS` terms is admitted (``terms - 1``); beyond that, blocked summation with blocks
    of about sqrt(terms), whose bound is ``2 sqrt(terms)``.
    """
    return np.where(terms <= SEQUENTIAL_TERMS, np.maximum(terms - 1.0, 0.0), SEQUENTIAL_TERMS + 2.0 * np.sqrt(terms))


def reach_of_sum(magnitude: np.ndarray, terms: int | np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
    """Return what the partial sums of terms may reach, given the sum of their magnitudes.

    The weights of a softmax are quotients of numbers up to 1 by their sum. A kernel that divides last, as online
    softmax does, adds up products that are larger by that sum, which is at most the number of terms.
    """
    return magnitude * np.maximum(terms, 1) if arithmetic.contract.reassociation else magnitude


def bounded_sum(
    a: Bounded,
    terms: int | np.ndarray,
    add: Callable[[np.ndarray], np.ndarray],
    settled: Callable[[], np.ndarray] | None = None,
) -> Bounded:
    """Return sums of the elements of `a` in any order that `summation_growth` admits.

    Args:
        a: the terms of all sums.
        terms: the number of terms of each sum.
        add: returns the sums of an array of terms, such as numpy.sum along an axis.
        settled: returns the error of the sums as results of the call: see `Bounded.settled`.
    """
    largest, value, inherited = a.arithmetic.largest, add(a.value), add(a.error)
    magnitude, growth = add(abs(a.value) + a.error), summation_growth(terms) * a.arithmetic.roundoff
    rounding = growth * magnitude
    # Some orders pass through the sum of all terms of one sign.
    overflows = np.isfinite(magnitude) & ~(reach_of_sum(magnitude, terms, a.arithmetic) + rounding <= largest)
    infinite = np.isinf(value)
    if infinite.any():
        # The finite terms of the other sign may overflow first, which makes the sum NaN.
        sizes = np.where(np.isfinite(a.value), abs(a.value) + a.error, 0.0)
        opposite = np.where(value > 0, add(np.where(a.value < 0, sizes, 0.0)), add(np.where(a.value > 0, sizes, 0.0)))
        overflows |= infinite & ~(opposite * (1 + growth) <= largest)
    operand, steps = Bounded(value, inherited, a.arithmetic), np.where(growth > 0, ROUNDED_ONCE, 0.0)
    result = elementary_step(value, inherited + rounding, (operand,), steps, overflows, settled=settled)
    certain_nan = np.isnan(a.value) & (a.error == 0)
    if certain_nan.any():  # makes a sum NaN, whatever unknown terms there are beside it
        result.error = np.where(add(certain_nan.astype(np.float64)) > 0, 0.0, result.error)
    return result


# Sums, means and variances.


@rule_for(np.sum)
def total(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    """Return numpy.sum in any order that `summation_growth` admits; for a comparison, the number of true elements."""
    if isinstance(a, Comparison):
        return np.sum(certain(a), axis=axis, keepdims=keepdims)
    add, terms = functools.partial(np.sum, axis=axis, keepdims=keepdims), number_of_terms(a, axis)
    if terms == 1:
        return Bounded(add(a.value), add(a.error), a.arithmetic, None if a.limit is None else add(a.limit))

    def settled() -> np.ndarray:
        unit = np.min(a.terms.unit, axis=axis, keepdims=keepdims, initial=np.inf)
        return exact_sum_error(Terms(unit, add(a.terms.reach)), a.arithmetic)

    result = bounded_sum(a, terms, add, settled)
    if a.limit is None:
        return result
    return set_least(result, np.where(np.min(a.limit, axis=axis, keepdims=keepdims, initial=0) >= 0, 0.0, -np.inf))


@rule_for((np.add, "reduce"))
def add_reduce(a: Any, axis: Any = 0, *, keepdims: bool = False) -> Any:
    """Return the sum along an axis, by default the first."""
    return total(a, axis, keepdims=keepdims)


def number_of_terms(a: Bounded, axis: Any) -> int:
    """Return the number of elements in each sum along the axes."""
    if axis is None:
        return a.size
    axes = axis if isinstance(axis, tuple) else (axis,)
    return int(np.prod([a.shape[i] for i in axes], dtype=int))


@rule_for(np.mean)
def mean(a: Any, axis: Any = None, *, keepdims: bool = False) -> Bounded:
    """Return the sum divided by the number of its terms."""
    a = lift(a, a.arithmetic)
    return divide(total(a, axis, keepdims=keepdims), lift(number_of_terms(a, axis), a.arithmetic))


@rule_for(np.var)
def var(a: Bounded, axis: Any = None, *, ddof: float = 0, correction: float = 0, keepdims: bool = False) -> Bounded:
    """Return the mean of the squared deviations from the mean, which is never below 0.

    The error of the mean enters to first order, which admits Welford's and pairwise updates (Chan, Golub and LeVeque,
    1983). The mean of the squares minus the square of the mean is less accurate, and not admitted.
    """
    squares = total(square(subtract(a, mean(a, axis, keepdims=True))), axis, keepdims=keepdims)
    return divide(squares, lift(max(number_of_terms(a, axis) - (ddof or correction), 0), a.arithmetic))


@rule_for(np.std)
def std(a: Bounded, axis: Any = None, *, ddof: float = 0, correction: float = 0, keepdims: bool = False) -> Bounded:
    """Return the square root of the variance."""
    return sqrt(var(a, axis, ddof=ddof, correction=correction, keepdims=keepdims))


@rule_for(np.cumsum)
def cumsum(a: Bounded, axis: int | None = None) -> Bounded:
    """Return each partial sum in any order that `summation_growth` admits for its number of terms."""
    if axis is None:
        return cumsum(a.reshape(-1), 0)
    terms = np.arange(1, a.shape[axis] + 1).reshape([-1 if i == axis % a.ndim else 1 for i in range(a.ndim)])
    return bounded_sum(a, terms, functools.partial(np.cumsum, axis=axis))


@rule_for((np.add, "accumulate"))
def add_accumulate(a: Bounded, axis: int = 0) -> Bounded:
    """Return the partial sums along an axis, by default the first."""
    return cumsum(a, axis)


@rule_for(np.prod)
def prod(a: Bounded, axis: Any = None, *, keepdims: bool = False) -> Bounded:
    """Return the product in any order: ``terms - 1`` roundings, and the relative errors of all factors.

    See `fourfold.numerics.steps.orders`.
    """

    def multiply(part: np.ndarray) -> Any:
        return np.prod(part, axis=axis, keepdims=keepdims)

    return bounded_product(a, number_of_terms(a, axis), multiply)


def bounded_product(a: Bounded, terms: int | np.ndarray, multiply: Callable[[np.ndarray], np.ndarray]) -> Bounded:
    """Return products of the elements of `a` in any order.

    Args:
        a: the factors of all products.
        terms: the number of factors of each product.
        multiply: returns the products of an array of factors, such as numpy.prod along an axis.
    """
    arithmetic, size = a.arithmetic, abs(a.value)

    def has_factor(factors: np.ndarray) -> np.ndarray:
        return multiply(np.where(factors, 0.0, 1.0)) == 0

    value = multiply(a.value)
    inherited = multiply(size + a.error) - multiply(size)
    farthest, underflow, underflows = partial_products(
        size - a.error, size + a.error, multiply, terms, arithmetic, arithmetic.smallest_normal
    )
    infinite = has_factor(np.isinf(size))
    unknown = ~(farthest <= arithmetic.largest) | has_factor(np.isinf(a.error)) | (infinite & underflows)
    # A factor that is certainly 0 makes the product 0, or NaN if another is infinite.
    certain_zero = has_factor((size == 0) & (a.error == 0))
    underflow, unknown = np.where(certain_zero, 0.0, underflow), unknown & ~(certain_zero & infinite)
    steps = np.maximum(np.asarray(terms) - 1, 0)
    result = elementary_step(value, inherited + underflow, (Bounded(value, inherited, arithmetic),), steps, unknown)
    # The only factor of a product is not rounded.
    result.error = np.where(np.asarray(terms) == 1, multiply(a.error), result.error)
    return result


# Extremes.


def order_statistic(order: Callable[[np.ndarray], np.ndarray], a: Bounded) -> Bounded:
    """Return the result of `order`, a function that picks numbers and is monotonic in each of them."""
    value, unknown = order(a.value), np.isinf(a.error)
    high = order(np.where(unknown, np.inf, a.value + a.error))
    low = order(np.where(unknown, -np.inf, a.value - a.error))
    error = np.maximum(high - value, value - low)
    settled = (high == low) | (np.isnan(value) & np.isnan(high) & np.isnan(low))
    error = np.where(settled, 0.0, np.where(np.isnan(error), np.inf, error))
    return Bounded(value, error, a.arithmetic, None if a.limit is None else order(a.limit))


def extreme(choose: Callable[..., np.ndarray]) -> Callable[..., Bounded]:
    """Return the rule of numpy.max or numpy.min, which do not round."""

    def rule(a: Bounded, axis: Any = None, *, keepdims: bool = False, initial: float | None = None) -> Bounded:
        start: dict[str, Any] = {} if initial is None else {"initial": initial}
        result = order_statistic(functools.partial(choose, axis=axis, keepdims=keepdims, **start), a)
        if initial is not None:
            result.error = np.maximum(result.error, lift(initial, a.arithmetic).error)
        return result

    return rule


largest, smallest = extreme(np.max), extreme(np.min)
rule_for(np.max, np.amax)(largest)
rule_for(np.min, np.amin)(smallest)


@rule_for((np.maximum, "reduce"))
def maximum_reduce(a: Bounded, axis: Any = 0, *, keepdims: bool = False, initial: float | None = None) -> Bounded:
    """Return the maximum along an axis, by default the first."""
    return largest(a, axis, keepdims=keepdims, initial=initial)


@rule_for((np.minimum, "reduce"))
def minimum_reduce(a: Bounded, axis: Any = 0, *, keepdims: bool = False, initial: float | None = None) -> Bounded:
    """Return the minimum along an axis, by default the first."""
    return smallest(a, axis, keepdims=keepdims, initial=initial)


def position(find: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of numpy.argmax or numpy.argmin, which return the first of equal elements.

    The rule raises `HangsOnRounding` if the position depends on rounding.
    """

    def rule(a: Bounded, axis: int | None = None, *, keepdims: bool = False) -> Any:
        rows = a.reshape(-1) if axis is None else a
        dim = 0 if axis is None else axis
        index = find(rows.value, axis=dim, keepdims=True)
        rivals = (rows != rows.rearrange(lambda part: np.take_along_axis(part, index, dim))).uncertain
        np.put_along_axis(rivals, index, False, dim)
        if (rivals | np.isinf(rows.error)).any():
            raise HangsOnRounding(f"numpy.{find.__name__} depends on rounding errors")
        return find(a.value, axis=axis, keepdims=keepdims)

    return rule


rule_for(np.argmax)(position(np.argmax))
rule_for(np.argmin)(position(np.argmin))


@rule_for(np.any)
def any_of(a: Any, axis: Any = None, *, keepdims: bool = False) -> Comparison:
    """Return whether any element is true: certain where one is certainly true, or where none is uncertain."""
    a = truth(a, a.arithmetic)
    sure = np.any(a.outcome & ~a.uncertain, axis=axis, keepdims=keepdims)
    uncertain = ~sure & np.any(a.uncertain, axis=axis, keepdims=keepdims)
    return Comparison(np.any(a.outcome, axis=axis, keepdims=keepdims), uncertain, a.arithmetic)


@rule_for(np.all)
def all_of(a: Any, axis: Any = None, *, keepdims: bool = False) -> Comparison:
    """Return whether every element is true."""
    return ~any_of(~truth(a, a.arithmetic), axis, keepdims=keepdims)


@rule_for(np.count_nonzero)
def count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    """Return the number of elements that are true, or not 0. It must not depend on rounding."""
    return np.count_nonzero(certain(truth(a, a.arithmetic)), axis=axis, keepdims=keepdims)


# Products of matrices.


def exponent_field(size: np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
    """Return the magnitudes that tensor cores use for half types: a subnormal number has the smallest normal exponent.

    Observed on compute capability 9.0: the sum of 2^-14 and 2^-28 loses the latter beside 2^15 times the smallest
    subnormal float16, 2^-24, and not beside 2^15 times 0, or 2^-9 from normal factors.
    """
    if arithmetic.storage is None:
        return size
    smallest = arithmetic.storage.smallest_normal
    return np.where((size > 0) & (size < smallest), smallest, size)


@rule_for(np.matmul)
def matrix_product(a: Bounded, b: Bounded) -> Bounded:
    """Return a @ b, with products and sums in any order that `summation_growth` admits.

    Tensor cores align the products of a step to the largest and truncate below its last digits, which costs up to twice
    as much as rounding to nearest. A subnormal factor costs as much as a normal one.

    Source: Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ Computer Science 2021.
    """
    if a.ndim == 1:
        return matrix_product(a[None, :], b)[..., 0] if b.ndim == 1 else matrix_product(a[None, :], b)[..., 0, :]
    if b.ndim == 1:
        return matrix_product(a, b[:, None])[..., 0]
    arithmetic, terms = a.arithmetic, a.shape[-1]
    size_a, error_a, size_b, error_b = (
        np.where(np.isfinite(part), part, 0) for part in (abs(a.value), a.error, abs(b.value), b.error)
    )
    value = a.value @ b.value
    rough = a.error.any() or b.error.any()
    inherited = error_a @ (size_b + error_b) + size_a @ error_b if rough else np.zeros_like(value)
    magnitude = exponent_field(size_a, arithmetic) @ exponent_field(size_b, arithmetic) + inherited
    rounding = CUT_OFF * (summation_growth(terms) + 1) * arithmetic.roundoff * magnitude
    rounding = rounding + np.where(magnitude > 0, terms * arithmetic.smallest_normal, 0)
    # As for a sum, some orders pass through the sum of all terms of one sign; infinite terms do not undo that.
    unknown = ~(reach_of_sum(magnitude, terms, arithmetic) + rounding <= arithmetic.largest)
    if rough:
        unknown |= np.isinf(a.error).any(axis=-1)[..., :, None] | np.isinf(b.error).any(axis=-2)[..., None, :]
        # An infinite element times one that may be 0.
        unknown |= (np.isinf(a.value).astype(int) @ may_vanish(b).astype(int)) > 0
        unknown |= (may_vanish(a).astype(int) @ np.isinf(b.value).astype(int)) > 0
    error = inherited + rounding

    def settled() -> np.ndarray:
        rows, cols = np.min(a.terms.unit, axis=-1, initial=np.inf), np.min(b.terms.unit, axis=-2, initial=np.inf)
        unit = rows[..., :, None] * cols[..., None, :]
        return exact_sum_error(Terms(unit, a.terms.reach @ b.terms.reach), arithmetic)

    return elementary_step(value, error, (Bounded(value, error, arithmetic),), ROUNDED_ONCE, unknown, settled=settled)


@rule_for(np.dot)
def dot(a: Any, b: Any) -> Bounded:
    """Return numpy.dot: the product with a number, or `matrix_product`."""
    arithmetic = arithmetic_of(a, b)
    a, b = lift(a, arithmetic), lift(b, arithmetic)
    if 0 in (a.ndim, b.ndim):
        return multiply(a, b)
    if b.ndim > 2:
        raise NoRule("numpy.dot has no running-error rule for a right operand of more than two axes: see numpy.matmul")
    return matrix_product(a, b)


# Functions that move elements or create arrays: no rounding.


def join_rule(join: Callable[..., np.ndarray]) -> Callable[..., Any]:
    """Return the rule of numpy.stack or numpy.concatenate, for bounded and plain arrays or for comparisons."""

    def rule(arrays: Sequence[Any], axis: int | None = 0) -> Any:
        arithmetic = arithmetic_of(*arrays)
        if all(isinstance(a, Comparison) for a in arrays):
            return Comparison(
                join([a.outcome for a in arrays], axis), join([a.uncertain for a in arrays], axis), arithmetic
            )
        lifted = [lift(a, arithmetic) for a in arrays]
        return Bounded(join([a.value for a in lifted], axis), join([a.error for a in lifted], axis), arithmetic)

    return rule


stack, concatenate = join_rule(np.stack), join_rule(np.concatenate)
rule_for(np.stack)(stack)
rule_for(np.concatenate)(concatenate)


def moving(function: Callable[..., Any]) -> Rule:
    """Return the rule of a function that moves, omits or repeats elements: each keeps its error."""

    def compute(a: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(a, Bounded | Comparison):
            raise NoRule(
                f"numpy.{function.__name__} has no running-error rule where only another argument has an error"
            )
        return a.rearrange(lambda part: function(part, *args, **kwargs))

    names = list(inspect.signature(function).parameters)
    names = list(itertools.takewhile(lambda name: name not in ("order", "out", "subok", "copy"), names))
    return Rule(compute, lift, 1, len(names), frozenset(names[1:]), selects=True)


for _function in (
    np.broadcast_to,
    np.copy,
    np.diagonal,
    np.expand_dims,
    np.flip,
    np.matrix_transpose,
    np.moveaxis,
    np.ravel,
    np.repeat,
    np.reshape,
    np.roll,
    np.squeeze,
    np.swapaxes,
    np.take,
    np.take_along_axis,
    np.tile,
    np.transpose,
    np.tril,
    np.triu,
):
    RULES[_function] = moving(_function)


@rule_for(np.full_like)
def full_like(a: Any, fill_value: Any, *, shape: Any = None) -> Bounded:
    """Return an array filled with a value, or with broadcast values.

    Constants that the arithmetic cannot represent have an error.
    """
    fill = lift(fill_value, a.arithmetic)
    shape = a.shape if shape is None else shape
    return fill.rearrange(lambda part: np.array(np.broadcast_to(part, shape)))


@rule_for(np.zeros_like)
def zeros_like(a: Any, *, shape: Any = None) -> Bounded:
    """Return exact zeros."""
    return Bounded.exact(np.zeros_like(lift(a, a.arithmetic).value, shape=shape), a.arithmetic)


@rule_for(np.ones_like)
def ones_like(a: Any, *, shape: Any = None) -> Bounded:
    """Return exact ones."""
    return Bounded.exact(np.ones_like(lift(a, a.arithmetic).value, shape=shape), a.arithmetic)


@rule_for(np.empty_like)
def empty_like(a: Any, *, shape: Any = None) -> Bounded:
    """Return NaN with an infinite error: a result that reads an unwritten element is unknown."""
    return full_like(a, Bounded(np.array(np.nan), np.array(np.inf), a.arithmetic), shape=shape)


@rule_for(np.shape)
def shape_of(a: Any) -> tuple[int, ...]:
    """Return the shape, which carries no error."""
    return a.shape


@rule_for(np.ndim)
def ndim_of(a: Any) -> int:
    """Return the number of axes."""
    return a.ndim


@rule_for(np.size)
def size_of(a: Any, axis: int | None = None) -> int:
    """Return the number of elements, or of those along an axis."""
    return number_of_terms(a, axis)


# Functions whose results are elements of their operands, or the negatives of these.
_SELECTING: tuple[Any, ...] = (
    *(np.absolute, np.negative, np.positive, np.sign, np.maximum, np.minimum, np.where, np.clip),
    *(np.max, np.min, (np.maximum, "reduce"), (np.minimum, "reduce"), np.stack, np.concatenate),
    *(np.zeros_like, np.ones_like, np.empty_like),
)
for _selecting in _SELECTING:
    RULES[_selecting] = replace(RULES[_selecting], selects=True)
