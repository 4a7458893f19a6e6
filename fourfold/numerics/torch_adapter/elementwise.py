"""The rules of torch's elementwise operators: mostly those of NumPy's functions, under other names.

The rules of sums and products of matrices are in `along_axes`, those of moves in `moves`, and those of normalizations,
losses and convolutions in `networks`.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fourfold.numerics.bounded import RULES as NUMPY_RULES
from fourfold.numerics.bounded import Bounded, Comparison, NoRule, certain, truth, unspecified_where
from fourfold.numerics.steps.elementwise import (
    DIVISION,
    EXPONENT,
    EXPONENTIAL,
    POWER,
    REORDERING,
    ROUNDED_ONCE,
    WITHIN_2_ULP,
    absolute,
    add,
    divide,
    elementary_step,
    exp,
    maximum,
    minimum,
    multiply,
    power,
    reciprocal,
    saturating_step,
    set_least,
    sqrt,
    square,
    subtract,
    units,
    where,
)
from fourfold.numerics.steps.orders import either_formula
from fourfold.numerics.torch_adapter.tensors import (
    LOGICAL,
    BoundedTensor,
    Tied,
    arithmetic,
    as_comparison,
    current,
    result_dtype,
    rule,
    whole,
)

Array = np.ndarray
# The unit of double precision; torch computes special functions within a few units of the last digit.
DOUBLE = float(np.finfo(np.float64).eps)


def aten(*names: str) -> Callable:
    """Register a rule of operators of torch's own library: see `rule`."""
    return rule(*(f"aten.{name}" for name in names))


def lift_operand(x: Any) -> Bounded:
    """Convert an operand to a `Bounded` of the tested arithmetic."""
    return current().numbers.lift(x, arithmetic())


def axes(dim: Any) -> Any:
    """Convert torch's axes to NumPy's: None, or an empty list, means all."""
    if dim is None or isinstance(dim, int):
        return dim
    return tuple(dim) or None


def by_numpy(function: Any) -> Callable[..., Any]:
    """Apply NumPy's rule to lifted operands."""
    compute = NUMPY_RULES[function].compute
    return lambda *operands: compute(*map(lift_operand, operands))


# NumPy's functions whose rule covers the aten operator of the same name completely.
_SAME: tuple[Any, ...] = (
    *(np.exp, np.exp2, np.log, np.log2, np.sqrt, np.square, np.reciprocal, np.sin, np.cos),
    *(np.maximum, np.minimum, np.isnan, np.isinf, np.isfinite),
)
for _function in _SAME:
    aten(f"{_function.__name__}.default")(by_numpy(_function))
aten("abs.default")(by_numpy(np.absolute))
aten("neg.default")(by_numpy(np.negative))


# Sums, products and quotients.


def scaled(x: Any, factor: Any) -> Bounded:
    """Return a number times a factor that is mostly 1."""
    return lift_operand(x) if factor == 1 else multiply(lift_operand(x), lift_operand(factor))


@aten("add.Tensor", "add.Scalar")
def add_scaled(a: Any, b: Any, alpha: Any = 1) -> Bounded:
    """Return a + alpha b."""
    return add(lift_operand(a), scaled(b, alpha))


@aten("sub.Tensor", "sub.Scalar")
def subtract_scaled(a: Any, b: Any, alpha: Any = 1) -> Bounded:
    """Return a - alpha b."""
    return subtract(lift_operand(a), scaled(b, alpha))


@aten("rsub.Tensor", "rsub.Scalar")
def subtract_from(a: Any, b: Any, alpha: Any = 1) -> Bounded:
    """Return b - alpha a."""
    return subtract(lift_operand(b), scaled(a, alpha))


@aten("mul.Tensor", "mul.Scalar")
def times(a: Any, b: Any) -> Bounded:
    """Return a b; a factor that is a comparison selects the other factor or 0."""
    if a is b:
        return square(lift_operand(a))
    for choice, other in ((a, b), (b, a)):
        if isinstance(choice, Tied):
            mark_kinks(choice, lift_operand(other), lift_operand(0.0))
    return multiply(lift_operand(a), lift_operand(b))


@aten("div.Tensor", "div.Scalar")
def quotient(a: Any, b: Any) -> Bounded:
    """Return a / b."""
    return divide(lift_operand(a), lift_operand(b))


@aten("div.Tensor_mode", "div.Scalar_mode")
def quotient_rounded(a: Any, b: Any, *, rounding_mode: str | None = None) -> Bounded:
    """Return a / b, rounded down or towards 0; it must not depend on rounding."""
    result = divide(lift_operand(a), lift_operand(b))
    return result if rounding_mode is None else steps_of(np.floor if rounding_mode == "floor" else np.trunc)(result)


def steps_of(function: np.ufunc) -> Callable[[Any], Bounded]:
    """Return the rule of a step function: exact where its argument lies between two steps."""

    def compute(a: Any) -> Bounded:
        a = lift_operand(a)
        value = function(a.value)
        # A computed number that is known to be exact certainly lies on its side of a step.
        radius = np.where(a.terms.exact(a.arithmetic), 0.0, a.error)
        low, high = function(a.value - radius), function(a.value + radius)
        error = np.where(radius > 0, np.maximum(abs(high - value), abs(value - low)), 0.0)
        return Bounded(value, np.where(np.isinf(a.error), np.inf, error), a.arithmetic)

    return compute


for _name, _steps in {"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.rint}.items():
    aten(f"{_name}.default")(steps_of(_steps))


@aten("lerp.Scalar", "lerp.Tensor")
def lerp(a: Any, b: Any, weight: Any) -> Bounded:
    """Return a + weight (b - a)."""
    a, b = lift_operand(a), lift_operand(b)
    return add(a, multiply(lift_operand(weight), subtract(b, a)))


# Elementary functions.


@aten("rsqrt.default")
def rsqrt(a: Any) -> Bounded:
    """Return 1 / sqrt(a)."""
    return reciprocal(sqrt(lift_operand(a)))


@aten("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def to_the_power(a: Any, b: Any) -> Bounded:
    """Return a^b; some powers are computed as roots and products, as in torch."""
    special_powers = {0.5: sqrt, -0.5: rsqrt, -1: reciprocal, 2: square, -2: lambda x: reciprocal(square(x))}
    if isinstance(b, int | float):
        if b in special_powers:
            return special_powers[b](lift_operand(a))
        if b == 0:
            return Bounded.exact(np.ones_like(lift_operand(a).value), arithmetic())
    return power(lift_operand(a), lift_operand(b))


@aten("log10.default")
def log10(a: Any) -> Bounded:
    """Return log(a) / log(10)."""
    result = divide(NUMPY_RULES[np.log].compute(lift_operand(a)), lift_operand(math.log(10)))
    return Bounded(np.log10(lift_operand(a).value), result.error, result.arithmetic)


@aten("sigmoid.default")
def sigmoid(a: Any) -> Bounded:
    """Return s = 1 / (1 + e^-a), with the slope s (1 - s), whose logarithm changes no faster than a.

    The exponential may overflow, which leaves the correct 0.
    """
    a = lift_operand(a)
    small = np.exp(-abs(a.value))
    far = small / (1 + small)
    value = np.where(a.value < 0, far, 1 / (1 + small))
    slope = value * np.where(a.value < 0, 1 / (1 + small), far)
    inherited = np.minimum(np.where(slope > 0, slope * np.expm1(a.error), np.minimum(a.error, 1)), 1)
    reach = np.where(np.isfinite(a.value), abs(a.value), 0)
    exponential = (EXPONENTIAL + EXPONENT * reach) * a.arithmetic.roundoff * slope
    inherited = np.where(np.isinf(a.error), np.inf, inherited)
    return set_least(elementary_step(value, inherited + exponential, (a,), ROUNDED_ONCE + DIVISION), 0.0)


def or_by_formula(function: Any, formula: Callable[[Bounded], Bounded]) -> Callable[[Any], Bounded]:
    """Return NumPy's rule, with a bound that also admits kernels of other people that use another formula.

    Triton has no function for these: its kernels write ``log(1 + x)``, and a result near 0 keeps its absolute accuracy
    alone.
    """
    compute = NUMPY_RULES[function].compute

    def rule(a: Any) -> Bounded:
        a = lift_operand(a)
        return either_formula(compute(a), formula(a)) if a.arithmetic.contract.reassociation else compute(a)

    return rule


def log_of_sum(a: Bounded) -> Bounded:
    """Return log(1 + a)."""
    return NUMPY_RULES[np.log].compute(add(lift_operand(1.0), a))


def tanh_by_sigmoid(a: Bounded) -> Bounded:
    """Return 2 sigmoid(2 a) - 1."""
    two = lift_operand(2.0)
    return subtract(multiply(two, sigmoid(multiply(two, a))), lift_operand(1.0))


aten("log1p.default")(or_by_formula(np.log1p, log_of_sum))
expm1 = aten("expm1.default")(or_by_formula(np.expm1, lambda a: subtract(exp(a), lift_operand(1.0))))
aten("tanh.default")(or_by_formula(np.tanh, tanh_by_sigmoid))


def special(
    function: Callable[[torch.Tensor], torch.Tensor],
    slope: Callable[[Array], Array],
    peak: float = np.nan,
    saturates: bool = False,
    steps: float = WITHIN_2_ULP,
) -> Callable[[Any], Bounded]:
    """Return the rule of a function that torch computes in double precision.

    Args:
        function: torch's function.
        slope: its derivative, whose magnitude is monotonic on either side of at most one turning point.
        peak: the argument of the steepest slope, if there is one.
        saturates: whether the function ends in ±1: see `saturating_step`.
        steps: the roundings of a call, by default those of a function within 2 ulp.
    """

    def compute(a: Any) -> Bounded:
        a = lift_operand(a)
        double = np.asarray(a.value, dtype=np.float64)
        value = function(torch.from_numpy(double)).numpy()
        # The digits of a long double beyond a double enter to first order.
        rest = np.where(np.isfinite(a.value), a.value - double, 0)
        value = value + np.where(rest == 0, 0, rest * slope(a.value))
        ends = a.value - a.error, a.value + a.error
        steepest = np.maximum(*(abs(slope(end)) for end in ends))
        if not np.isnan(peak):
            steepest = np.maximum(steepest, abs(slope(np.clip(peak, *ends))))
        inherited = np.where(a.error > 0, a.error * steepest, 0.0)
        inherited = inherited + 4 * DOUBLE * abs(value)
        result = elementary_step(value, inherited, (a,), steps)
        return saturating_step(result, inherited) if saturates else result

    return compute


def bell(x: Array) -> Array:
    """Return the derivative of erf: 2 / sqrt(pi) e^(-x^2)."""
    return 2 / np.sqrt(np.pi) * np.exp(-np.square(x))


def in_double(function: Callable[[torch.Tensor], torch.Tensor], x: Array) -> Array:
    """Return a function of torch in double precision."""
    return function(torch.from_numpy(np.asarray(x, dtype=np.float64))).numpy()


def erfcx_slope(x: Array) -> Array:
    """Return the derivative of the scaled complementary error function."""
    return 2 * x * in_double(torch.special.erfcx, x) - 2 / np.sqrt(np.pi)


def i1_slope(x: Array) -> Array:
    """Return the derivative of the modified Bessel function of order 1, which is 1/2 at 0."""
    return np.where(x == 0, 0.5, in_double(torch.special.i0, x) - in_double(torch.special.i1, x) / x)


def arc(x: Array) -> Array:
    """Return the derivative of the arc sine."""
    return 1 / np.sqrt(1 - np.square(x))


erf = aten("erf.default")(special(torch.special.erf, bell, 0.0, saturates=True))
erfc = aten("erfc.default", "special_erfc.default")(special(torch.special.erfc, bell, 0.0))
atan = aten("atan.default")(special(torch.atan, lambda x: 1 / (1 + np.square(x)), 0.0))
aten("asinh.default")(special(torch.asinh, lambda x: 1 / np.sqrt(1 + np.square(x)), 0.0))
aten("acosh.default")(special(torch.acosh, lambda x: 1 / np.sqrt(np.square(x) - 1)))
aten("asin.default")(special(torch.asin, arc))
aten("acos.default")(special(torch.acos, arc))
aten("atanh.default")(special(torch.atanh, lambda x: 1 / (1 - np.square(x))))
aten("sinh.default")(special(torch.sinh, np.cosh))
aten("cosh.default")(special(torch.cosh, np.sinh))


aten("erfinv.default")(
    special(torch.erfinv, lambda x: np.sqrt(np.pi) / 2 * np.exp(np.square(in_double(torch.erfinv, x))))
)
# CUDA's functions of these names are within 6 ulp, and erfcx within 4.
aten("special_erfcx.default")(special(torch.special.erfcx, erfcx_slope, steps=units(4)))
aten("i0.default")(special(torch.special.i0, lambda x: in_double(torch.special.i1, x), steps=units(6)))
aten("special_i0e.default")(special(torch.special.i0e, np.ones_like, steps=units(6)))
aten("special_i1e.default")(special(torch.special.i1e, np.ones_like, steps=units(6)))
aten("special_i1.default")(special(torch.special.i1, i1_slope, steps=units(6)))


@aten("lgamma.default")
def lgamma(a: Any) -> Bounded:
    """Return the logarithm of the magnitude of the gamma function.

    Where it is less than 1, kernels add terms of about that size: CUDA's function, within 6 ulp elsewhere, has an error
    relative to them. Nothing is known below 0 beside a pole, at which the function is infinite.
    """
    a = lift_operand(a)
    result = special(torch.lgamma, lambda x: in_double(torch.digamma, x), steps=units(6))(a)
    return with_terms(result, a, 1.0)


@aten("digamma.default")
def digamma(a: Any) -> Bounded:
    """Return the derivative of the logarithm of the gamma function, as an asymptotic series past 10.

    Before 10 kernels subtract up to ten reciprocals from it, and below 0 they reflect the function: its terms are then
    as large as the function at the mirrored number and a cotangent.
    """
    a = lift_operand(a)
    double = np.asarray(a.value, dtype=np.float64)
    mirrored = np.where(double < 0, 1 - double, double)
    terms = sum(1 / (mirrored + k) for k in range(10)) + np.log(mirrored + 10)
    cotangent = np.where(double < 0, np.pi / abs(np.tan(np.pi * double)), 0)
    # The angle pi a is rounded, which turns it by as much.
    rotation = np.where(double < 0, np.pi * abs(np.pi * double) / np.square(np.sin(np.pi * double)), 0)
    result = special(torch.digamma, lambda x: in_double(lambda y: torch.polygamma(1, y), x))(a)
    return with_terms(result, a, (10 + DIVISION) * (terms + cotangent) + rotation)


def with_terms(result: Bounded, a: Bounded, terms: Any) -> Bounded:
    """Return a function of `a` with the error of one rounding of each of its terms, and poles at 0, -1, -2, ..."""
    rounding = REORDERING * a.arithmetic.roundoff * terms
    error = np.where(np.isfinite(result.value), result.error + rounding, result.error)
    crosses_pole = (a.value - a.error <= 0) & (np.floor(a.value - a.error) != np.floor(a.value + a.error))
    return Bounded(result.value, np.where(crosses_pole & (a.error > 0), np.inf, error), a.arithmetic)


@aten("polygamma.default")
def polygamma(n: int, a: Any) -> Bounded:
    """Return the n-th derivative of digamma, which the gradients of digamma need; nothing is known of it below 0."""
    a = lift_operand(a)
    slope = special(lambda x: torch.polygamma(n, x), lambda x: in_double(lambda y: torch.polygamma(n + 1, y), x))
    result = with_terms(slope(a), a, (10 + DIVISION) * abs(slope(a).value))
    return unspecified_where(result, a.value - a.error < 0)


@aten("tan.default")
def tan(a: Any) -> Bounded:
    """Return sin(a) / cos(a)."""
    return divide(np.sin(lift_operand(a)), np.cos(lift_operand(a)))


@aten("atan2.default")
def atan2(a: Any, b: Any) -> Bounded:
    """Return the angle of a point.

    It turns by at most the point's error over its distance, unless it may cross the negative axis.
    """
    a, b = lift_operand(a), lift_operand(b)
    value = np.arctan2(a.value, b.value)
    nearest = np.hypot(np.maximum(abs(a.value) - a.error, 0), np.maximum(abs(b.value) - b.error, 0))
    distance = a.error + b.error
    inherited = np.where(distance > 0, np.arctan(distance / nearest) * (np.pi / 2), 0.0)
    unknown = (distance > 0) & ((nearest <= 0) | ((abs(a.value) <= a.error) & (b.value <= b.error)))
    return elementary_step(value, inherited, (a, b), POWER, unknown)


@aten("hypot.default")
def hypot(a: Any, b: Any) -> Bounded:
    """Return sqrt(a^2 + b^2)."""
    return sqrt(add(square(lift_operand(a)), square(lift_operand(b))))


def remainder(whole_part: np.ufunc) -> Callable[[Any, Any], Bounded]:
    """Return the rule of a - n b with the whole part n of a / b; the result is unknown where n depends on rounding."""

    def compute(a: Any, b: Any) -> Bounded:
        a, b = lift_operand(a), lift_operand(b)
        # The function itself is exact: of numbers without an error it is rounded at most once.
        n = whole_part(a.value / b.value)
        value = np.fmod(a.value, b.value) if whole_part is np.trunc else np.remainder(a.value, b.value)
        error = a.error + abs(n) * b.error
        ends = [whole_part((a.value + i * a.error) / (b.value + j * b.error)) for i in (-1, 1) for j in (-1, 1)]
        unknown = (error > 0) & ~np.all([end == n for end in ends], axis=0)
        return elementary_step(value, error, (a, b), ROUNDED_ONCE, unknown | ((error > 0) & (abs(b.value) <= b.error)))

    return compute


aten("fmod.Tensor", "fmod.Scalar")(remainder(np.trunc))
aten("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")(remainder(np.floor))


# Choices.


def mark_kinks(choice: Comparison, a: Bounded, b: Bounded) -> None:
    """Mark the ties of a comparison where the two alternatives have the same value."""
    if not isinstance(choice, Tied):
        return
    shape = np.broadcast_shapes(choice.shape, a.shape, b.shape)
    may_tie = np.broadcast_to(abs(a.value - b.value) <= a.error + b.error, shape)
    kinks = np.lib.stride_tricks.as_strided(choice.kinks, **broadcast(choice.kinks, shape))
    ties = np.broadcast_to(choice.ties, shape)
    kinks[may_tie & ties] = True


def broadcast(part: Array, shape: tuple[int, ...]) -> dict[str, Any]:
    """Shape and strides of an array that is broadcast; unlike numpy.broadcast_to's, it can be written into."""
    return {"shape": shape, "strides": np.broadcast_to(part, shape).strides}


@aten("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def select(condition: Any, a: Any, b: Any) -> Any:
    """Return torch.where; both choices are admitted where the condition is uncertain."""
    condition = as_comparison(condition)
    if all(isinstance(x, int | np.ndarray) for x in (a, b)) and not condition.uncertain.any():
        return np.where(condition.outcome, a, b)
    a, b = lift_operand(a), lift_operand(b)
    mark_kinks(condition, a, b)
    return where(condition, a, b)


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(a: Any, mask: Any, fill: Any) -> Bounded:
    """Return the number `fill` where the mask is true."""
    return select(mask, fill, a)


@aten("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_min.Tensor")
def clamp(a: Any, min: Any = None, max: Any = None) -> Bounded:
    """Return the minimum of the upper limit and the maximum of `a` and the lower limit."""
    return NUMPY_RULES[np.clip].compute(*(None if x is None else lift_operand(x) for x in (a, min, max)))


@aten("clamp_max.default", "clamp_max.Tensor")
def clamp_max(a: Any, max: Any) -> Bounded:
    """Return the minimum of `a` and an upper limit."""
    return clamp(a, None, max)


@aten("hardtanh.default")
def hardtanh(a: Any, low: Any = -1.0, high: Any = 1.0) -> Bounded:
    """Return `a` clamped between two limits."""
    return clamp(a, low, high)


def nan_ignoring_rule(choose: Callable[[Bounded, Bounded], Bounded]) -> Callable[[Any, Any], Bounded]:
    """Return the rule of the larger or smaller of two numbers that ignores NaN."""

    def compute(a: Any, b: Any) -> Bounded:
        a, b = lift_operand(a), lift_operand(b)
        return where(np.isnan(a), b, where(np.isnan(b), a, choose(a, b)))

    return compute


aten("fmax.default")(nan_ignoring_rule(maximum))
aten("fmin.default")(nan_ignoring_rule(minimum))


@aten("copysign.Tensor", "copysign.Scalar")
def with_sign_of(a: Any, b: Any) -> Bounded:
    """Return |a| with the sign of b."""
    a, b = lift_operand(a), lift_operand(b)
    value = np.copysign(a.value, b.value)
    either = (b.error > 0) & ~(abs(b.value) > b.error)
    return Bounded(value, np.where(either, 2 * abs(value) + a.error, a.error), a.arithmetic)


@aten("sign.default", "sgn.default")
def sign(a: Any) -> Bounded:
    """Return -1, 0 or 1; as the derivative of a magnitude, any number between at 0.

    NaN is unspecified, because torch's sign of NaN is 0 on a CPU.
    """
    a = lift_operand(a)
    result = NUMPY_RULES[np.sign].compute(a)
    result.error = np.where(np.isnan(a.value), np.inf, result.error)
    evaluation = current()
    if evaluation.backward and evaluation.contract.ties:
        result.error = np.where((a.value == 0) & (a.error == 0), 1.0, result.error)
    return result


# Comparisons and logical functions.


def comparison_rule(function: np.ufunc, equality: bool, scalar: bool) -> Callable[[Any, Any], Comparison]:
    """Return the rule of a comparison that records its ties where they are free.

    In a backward pass the comparison is part of the derivative of a continuous function, and uncertain at a tie and at
    NaN. Autograd tests equality with a constant for other reasons: to avoid a division by 0.
    """
    numpy_rule = NUMPY_RULES[function].compute

    def compute(a: Any, b: Any) -> Comparison:
        a, b = lift_operand(a), lift_operand(b)
        result = numpy_rule(a, b)
        evaluation = current()
        if not evaluation.contract.ties or (equality and scalar):
            return result
        ties = abs(a.value - b.value) <= a.error + b.error
        if evaluation.backward:
            free = ties | ((np.isnan(a.value) | np.isnan(b.value)) & evaluation.contract.nonfinite)
            return Comparison(result.outcome, result.uncertain | free, result.arithmetic)
        return Tied(result.outcome, result.uncertain, result.arithmetic, ties, np.zeros_like(ties))

    return compute


for _function, _name in {
    np.equal: "eq",
    np.not_equal: "ne",
    np.less: "lt",
    np.less_equal: "le",
    np.greater: "gt",
    np.greater_equal: "ge",
}.items():
    for _overload in ("Tensor", "Scalar"):
        aten(f"{_name}.{_overload}")(comparison_rule(_function, _name in ("eq", "ne"), _overload == "Scalar"))


def logical_rule(function: np.ufunc) -> Callable[..., Comparison]:
    """Return the rule of a logical function, which inherits the ties of its operands."""
    numpy_rule = NUMPY_RULES[function].compute

    def compute(*operands: Any) -> Comparison:
        parts = [truth(operand, arithmetic()) for operand in operands]
        result = numpy_rule(*parts)
        ties = [part.ties for part in parts if isinstance(part, Tied)]
        if not ties:
            return result
        tied = np.array(np.broadcast_to(np.any(np.broadcast_arrays(*ties), axis=0), result.shape))
        return Tied(result.outcome, result.uncertain, result.arithmetic, tied, np.zeros_like(tied))

    return compute


for _function, _names in {
    np.logical_and: ("logical_and.default", "bitwise_and.Tensor", "__and__.Tensor"),
    np.logical_or: ("logical_or.default", "bitwise_or.Tensor", "__or__.Tensor"),
    np.logical_xor: ("logical_xor.default", "bitwise_xor.Tensor", "__xor__.Tensor"),
    np.logical_not: ("logical_not.default", "bitwise_not.default"),
}.items():
    aten(*_names)(logical_rule(_function))
    LOGICAL.update(f"aten.{_name}" for _name in _names)


@aten("item.default", "_local_scalar_dense.default")
def number(a: Any) -> Any:
    """Return a tensor as a Python number, which must not depend on rounding."""
    if isinstance(a, Comparison):
        return bool(certain(a).reshape(()))
    if isinstance(a, Bounded):
        if (a.error > 0).any():
            raise NoRule("a tensor is not made a Python number, which would drop its error: keep it a tensor")
        return float(a.value.reshape(()))
    return a.reshape(()).item()


# Activations, whose formulas are those of torch's documentation.


@whole("relu.default")
def relu(evaluation: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the maximum with 0.

    Autograd keeps only the result, where a 0 does not show whether the argument was 0: a note keeps the argument.
    """
    result = evaluation.call(torch.ops.aten.clamp_min.default, (args[0], 0.0), {})
    result.memory.note = lift_operand(evaluation.unwrap(args[0]))
    return result


@whole("threshold_backward.default")
def threshold_backward(evaluation: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the gradient where the number is above the threshold, else 0; both are right at the threshold."""
    grad, a, threshold = args
    note = a.memory.note if isinstance(a, BoundedTensor) else None
    operand = note if note is not None and note.shape == tuple(a.shape) else lift_operand(evaluation.unwrap(a))
    result = passes(lift_operand(evaluation.unwrap(grad)), operand, threshold, lift_operand(0.0))
    return evaluation.wrap(result, result_dtype((grad, a)))


@aten("leaky_relu.default")
def leaky_relu(a: Any, slope: Any = 0.01) -> Bounded:
    """Return a above 0, else slope times a."""
    return where(lift_operand(a) > 0.0, lift_operand(a), multiply(lift_operand(a), lift_operand(slope)))


@aten("silu.default")
def silu(a: Any) -> Bounded:
    """Return a / (1 + e^-a)."""
    return multiply(lift_operand(a), sigmoid(a))


@aten("silu_backward.default")
def silu_backward(grad: Any, a: Any) -> Bounded:
    """Return grad s (1 + a (1 - s)), with the sigmoid s."""
    s = sigmoid(a)
    return multiply(
        multiply(lift_operand(grad), s),
        add(lift_operand(1.0), multiply(lift_operand(a), subtract(lift_operand(1.0), s))),
    )


@aten("sigmoid_backward.default")
def sigmoid_backward(grad: Any, output: Any) -> Bounded:
    """Return grad s (1 - s)."""
    return multiply(
        lift_operand(grad), multiply(subtract(lift_operand(1.0), lift_operand(output)), lift_operand(output))
    )


@aten("tanh_backward.default")
def tanh_backward(grad: Any, output: Any) -> Bounded:
    """Return grad (1 - t^2)."""
    return multiply(lift_operand(grad), subtract(lift_operand(1.0), square(lift_operand(output))))


def inner(a: Bounded) -> Bounded:
    """Return the argument of the tanh that approximates erf in GELU: sqrt(2 / pi) (a + 0.044715 a^3)."""
    cube = multiply(multiply(a, a), a)
    return multiply(lift_operand(math.sqrt(2 / math.pi)), add(a, multiply(lift_operand(0.044715), cube)))


def half_of_one_and(x: Any) -> Bounded:
    """Return (1 + x) / 2, for x between -1 and 1."""
    return set_least(multiply(lift_operand(0.5), add(lift_operand(1.0), x)), 0.0)


@aten("gelu.default")
def gelu(a: Any, *, approximate: str = "none") -> Bounded:
    """Return a (1 + erf(a / sqrt(2))) / 2, or the same with a tanh that approximates erf.

    The sum cancels where a is far below 0: the error of erf or tanh near -1 remains, and the bound is |a| times some
    units of roundoff while the value vanishes. A relative bound, like that of erfc, is impossible: torch's own kernel
    on a CPU computes the sum, and reaches 0.55 of the bound between -4 and -2 in float32. Beyond -6, where erf is -1,
    `saturating_step` reduces the bound to a fifth: from 10 |a| units of roundoff to 2.
    """
    a = lift_operand(a)
    if approximate == "tanh":
        return multiply(a, half_of_one_and(np.tanh(inner(a))))
    return multiply(a, half_of_one_and(erf(multiply(a, lift_operand(math.sqrt(0.5))))))


@aten("gelu_backward.default")
def gelu_backward(grad: Any, a: Any, *, approximate: str = "none") -> Bounded:
    """Return the derivative of each of the formulas of `gelu`."""
    a, grad = lift_operand(a), lift_operand(grad)
    if approximate == "tanh":
        t = np.tanh(inner(a))
        steep = multiply(
            lift_operand(math.sqrt(2 / math.pi)),
            add(lift_operand(1.0), multiply(lift_operand(3 * 0.044715), square(a))),
        )
        slope = multiply(multiply(lift_operand(0.5), a), multiply(subtract(lift_operand(1.0), square(t)), steep))
        return multiply(grad, add(half_of_one_and(t), slope))
    density = np.exp(multiply(lift_operand(-0.5), square(a)))
    slope = multiply(a, multiply(density, lift_operand(1 / math.sqrt(2 * math.pi))))
    return multiply(grad, add(half_of_one_and(erf(multiply(a, lift_operand(math.sqrt(0.5))))), slope))


def passes(grad: Bounded, a: Bounded, threshold: Any, otherwise: Bounded) -> Bounded:
    """Return `otherwise` where a is at most the threshold, else the gradient, also at NaN.

    Both are right at the threshold.
    """
    return where(comparison_rule(np.less_equal, False, True)(a, threshold), otherwise, grad)


@aten("leaky_relu_backward.default")
def leaky_relu_backward(grad: Any, a: Any, slope: Any, self_is_result: bool) -> Bounded:
    """Return the gradient where `a` is above 0, else the slope times the gradient."""
    is_positive = comparison_rule(np.greater, False, True)(lift_operand(a), 0.0)
    return where(is_positive, lift_operand(grad), multiply(lift_operand(grad), lift_operand(slope)))


@aten("elu.default")
def elu(a: Any, alpha: Any = 1.0, scale: Any = 1.0, input_scale: Any = 1.0) -> Bounded:
    """Return scale a above 0, else scale alpha (e^(input_scale a) - 1)."""
    a = lift_operand(a)
    negative = multiply(expm1(scaled(a, input_scale)), lift_operand(alpha * scale))
    return where(a > 0.0, scaled(a, scale), negative)


@aten("softshrink_backward.default", "hardshrink_backward.default")
def shrink_backward(grad: Any, a: Any, limit: Any) -> Bounded:
    """Return the gradient where |a| exceeds the limit, else 0."""
    is_outside = comparison_rule(np.greater, False, True)(absolute(lift_operand(a)), limit)
    return where(is_outside, lift_operand(grad), lift_operand(0.0))
