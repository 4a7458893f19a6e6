"""Running error analysis: arrays that carry a bound on the rounding error of a computation in a given arithmetic.

An oracle evaluated on `Bounded` arrays in place of NumPy arrays returns its value and a bound: how far a correct
computation of the same formula in the tested arithmetic may be away. So no operation has a tolerance: a sum over many
terms, a difference of nearly equal areas or a quotient by a tiny divisor widens the bound by as much as it must, and
nowhere else. The cost of a step is derived from what hardware and libraries document. Two numbers are choices:
`REORDERING`, the number of roundings allowed in place of one, and `SEQUENTIAL_TERMS`, the longest sum that may be
computed sequentially. The comments at their definitions give the reasons and the measurements.

This module defines the arrays and dispatches NumPy's functions to their rules. The rules of elementwise functions are
in `fourfold.numerics.steps.elementwise`; those of functions along axes and of functions that move elements are in
`fourfold.numerics.steps.along_axes`.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.3 (running error
analysis), section 2.2 (the standard model), section 4.2 (blocked summation).
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np


@dataclass(frozen=True)
class Contract:
    """What a result leaves open, beyond rounding, to a kernel that does not document it.

    Attributes:
        ties: a derivative at a tie may lie anywhere between the one-sided ones.
        reassociation: the kernel may take steps in an order that costs more than the documented one, as scaling a
            number before its mean is subtracted.
        nonfinite: where the order of steps decides what infinities and NaN lead to, any result is right.
    """

    ties: bool = False
    reassociation: bool = False
    nonfinite: bool = False


# This library's own kernels must do what they document. Those of others may choose.
DOCUMENTED = Contract()
OPEN = Contract(ties=True, reassociation=True, nonfinite=True)


@dataclass(frozen=True)
class Arithmetic:
    """The floating-point arithmetic a kernel computes in."""

    roundoff: float
    largest: float
    smallest_normal: float
    # The arithmetic of the type in which results are stored, if it is narrower than the type of the computation.
    storage: "Arithmetic | None" = None
    contract: Contract = DOCUMENTED
    # Whether each intermediate result is rounded to the storage type, as torch does in places.
    rounds_each_step: bool = False


class NoRule(TypeError):
    """NumPy called a function that has no running-error rule."""


class HangsOnRounding(ValueError):
    """A definition depends on something that rounding may change, such as an order: no bound covers the result."""


@dataclass(frozen=True)
class Rule:
    """The running-error rule of a NumPy function, and the arguments that the rule covers.

    Attributes:
        compute: takes the arguments of the NumPy function, in the same order, and returns the result with its bound.
        operand: `lift` or `truth`, which is applied to every operand of a ufunc first.
        required: the number of required arguments.
        positional: the number of arguments that may be given by position.
        keywords: the arguments that may be given by name.
    """

    compute: Callable[..., Any]
    operand: Callable[[Any, Arithmetic], Any]
    required: int
    positional: int
    keywords: frozenset[str]
    # Whether every result is one of the operands' elements, so that it needs no further rounding.
    selects: bool = False

    @classmethod
    def of(cls, compute: Callable[..., Any], operand: Callable[[Any, Arithmetic], Any]) -> Self:
        """Return the rule of a function whose signature has the arguments of the NumPy function that it covers."""
        parameters = inspect.signature(compute).parameters.values()
        by_position = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        required = sum(p.default is p.empty for p in by_position)
        return cls(compute, operand, required, len(by_position), frozenset(p.name for p in parameters))

    def covers(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether the rule covers a call with these arguments."""
        return (
            self.required <= len(args) + len(kwargs) and len(args) <= self.positional and kwargs.keys() <= self.keywords
        )


# Keyed by NumPy function or ufunc; methods of a ufunc are keyed by the pair of the ufunc and the method's name.
RULES: dict[Any, Rule] = {}


def rule_for(*functions: Any, operand: Callable[[Any, Arithmetic], Any] | None = None) -> Callable:
    """Register the decorated function as a rule of NumPy functions, ufuncs, or pairs like ``(np.add, "reduce")``."""

    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            RULES[function] = Rule.of(compute, operand or lift)
        return compute

    return register


def numpy_name(function: Any) -> str:
    """Return the name of a NumPy function, like ``linalg.norm``, or of a pair, like ``add.reduce``."""
    if isinstance(function, tuple):
        return f"{function[0].__name__}.{function[1]}"
    module = getattr(function, "__module__", None) or "numpy"
    return f"{module}.{function.__name__}".removeprefix("numpy.")


def no_rule(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> NoRule:
    """Return the error for an uncovered call: the missing rule, where to add it, and the existing rules."""
    problem = f"numpy.{numpy_name(function)} has no running-error rule"
    if rule := RULES.get(function):
        unknown = sorted(kwargs.keys() - rule.keywords)
        problem += f" for its argument {unknown[0]}" if unknown else f" for {len(args) + len(kwargs)} arguments"
        problem += " (write x = x + y in place of x += y)" if unknown == ["out"] else ""
    modules = sorted({rule.compute.__module__.replace(".", "/") + ".py" for rule in RULES.values()})
    names = ", ".join(sorted(map(numpy_name, RULES)))
    return NoRule(f"{problem}. Rules are in {' and '.join(modules)}, where one can be added. There are: {names}")


def as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls the NumPy function."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    method.__doc__ = f"As numpy.{function.__name__}."
    return method


class FollowsNumPy(np.lib.mixins.NDArrayOperatorsMixin):
    """Base class that dispatches NumPy's functions and Python's operators to the rules and never drops the error."""

    __slots__ = ()

    arithmetic: Arithmetic

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        function = ufunc if method == "__call__" else (ufunc, method)
        rule = RULES.get(function)
        if rule is None or (kwargs and not rule.covers(inputs, kwargs)):
            raise no_rule(function, inputs, kwargs)
        operand, arithmetic = rule.operand, self.arithmetic
        with np.errstate(all="ignore"):
            return rounded_step(rule, rule.compute(*[operand(x, arithmetic) for x in inputs], **kwargs))

    def __array_function__(self, function: Callable, types: Sequence[type], args: tuple, kwargs: dict) -> Any:
        rule = RULES.get(function)
        if rule is None or not rule.covers(args, kwargs):
            raise no_rule(function, args, kwargs)
        with np.errstate(all="ignore"):
            return rounded_step(rule, rule.compute(*args, **kwargs))

    def _drops_the_error(self, *args: Any, **kwargs: Any) -> Any:
        raise NoRule(
            f"a {type(self).__name__} is not made a plain array or number, which would drop its error:"
            " stay with NumPy's functions, and take numpy.zeros_like(x) for an array to write into"
        )

    __array__ = __float__ = __int__ = __complex__ = __index__ = _drops_the_error

    def __getattr__(self, name: str) -> Any:
        problem = f"{type(self).__name__} has no attribute {name}"
        if not name.startswith("_") and hasattr(np.ndarray, name):
            attributes = sorted(n for n in dir(self) if not n.startswith("_") and hasattr(np.ndarray, n))
            problem += f"; of those of numpy.ndarray it has {', '.join(attributes)}"
        raise AttributeError(problem)

    def rearrange(self, move: Callable[[np.ndarray], np.ndarray]) -> Any:
        """Return the array with its elements, and their errors, rearranged by `move` like those of a plain array."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def T(self) -> Any:
        """As numpy.ndarray.T."""
        return self.rearrange(np.transpose)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        key = selecting(key)
        return self.rearrange(lambda part: part[key])

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(f"{self.size} elements are together neither true nor false: take numpy.any or numpy.all")
        return bool(np.all(certain(truth(self, self.arithmetic))))

    def reshape(self, *shape: Any) -> Any:
        """As numpy.ndarray.reshape."""
        return self.rearrange(lambda part: part.reshape(*shape))

    def transpose(self, *axes: Any) -> Any:
        """As numpy.ndarray.transpose."""
        return self.rearrange(lambda part: part.transpose(*axes))

    all = as_method(np.all)
    any = as_method(np.any)
    mean = as_method(np.mean)
    ravel = as_method(np.ravel)
    repeat = as_method(np.repeat)
    squeeze = as_method(np.squeeze)
    sum = as_method(np.sum)
    swapaxes = as_method(np.swapaxes)
    take = as_method(np.take)


@dataclass(frozen=True, eq=False)
class Comparison(FollowsNumPy):
    """A comparison of bounded arrays: its outcome, and where the computed outcome may differ from it.

    In arithmetic it counts as 1 where it is true and as 0 where it is false.
    """

    outcome: np.ndarray
    uncertain: np.ndarray
    arithmetic: Arithmetic

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.outcome.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of the outcome."""
        return np.dtype(bool)

    def rearrange(self, move: Callable[[np.ndarray], np.ndarray]) -> "Comparison":
        """Return the comparison with its elements rearranged by `move` like those of a plain array."""
        return Comparison(move(self.outcome), move(self.uncertain), self.arithmetic)

    def astype(self, dtype: Any) -> Any:
        """Convert to floats as ones and zeros with their errors, or to integers if it is certain."""
        kind = np.dtype(dtype).kind
        if kind == "b":
            return self
        return lift(self, self.arithmetic) if kind == "f" else certain(self).astype(dtype)


@dataclass(frozen=True, eq=False)
class Terms:
    """The sums and products of given numbers that make up a value: `unit` divides each term, `reach` is their total.

    Where `reach` is at most 1 / roundoff units, every partial sum of the terms, in any order and with products fused
    into it or not, is a multiple of the unit that the arithmetic can represent: all correct kernels compute the value
    exactly. A value that an earlier step rounded has the unit 0.
    """

    unit: np.ndarray
    reach: np.ndarray

    @classmethod
    def of(cls, value: np.ndarray, exact: np.ndarray) -> Self:
        """Return the terms of a number that consists of itself alone, where it is exact."""
        double = np.asarray(value, dtype=np.float64)
        fraction, exponent = np.frexp(double)
        digits = np.where(np.isfinite(fraction), np.ldexp(fraction, 53), 0).astype(np.int64)
        unit = np.ldexp((digits & -digits).astype(np.float64), exponent - 53)
        unit = np.where(double == 0, np.inf, unit)
        return cls(np.where(exact & (value == double), unit, 0), abs(value))

    @classmethod
    def unknown(cls, value: np.ndarray) -> Self:
        """Return the terms of a value of unknown origin."""
        return cls(np.zeros_like(value), abs(value))

    def __add__(self, other: "Terms") -> "Terms":
        return Terms(np.minimum(self.unit, other.unit), self.reach + other.reach)

    def __mul__(self, other: "Terms") -> "Terms":
        return Terms(self.unit * other.unit, self.reach * other.reach)

    def exact(self, arithmetic: Arithmetic) -> np.ndarray:
        """Return where no order of the steps rounds, overflows or underflows."""
        is_exact = (self.reach * arithmetic.roundoff <= self.unit) & (self.reach <= arithmetic.largest)
        return is_exact & (self.unit >= arithmetic.smallest_normal)


class Bounded(FollowsNumPy):
    """An array of exact values, with a bound on the absolute error of each.

    A value that is NaN or infinite has error 0: its class is certain. An error of infinity marks an unknown value
    (a divisor that may be 0, a step that overflows the arithmetic though its exact value is finite).

    `least` bounds every computed value from below: ``value - error``, or the tighter `limit` of a step that knows its
    result's sign or a lower bound of it. Square roots and divisions use it.

    `terms` shows where a comparison cannot depend on rounding: see `Terms`. The error of a value that every correct
    kernel computes exactly is kept, because other steps may compute what depends on it. Where the value is a result of
    the call, nothing depends on it, and `settled` is the smaller bound.
    """

    __slots__ = ("_settled", "_terms", "arithmetic", "error", "limit", "value")

    def __init__(
        self,
        value: np.ndarray,
        error: np.ndarray,
        arithmetic: Arithmetic,
        limit: np.ndarray | None = None,
        terms: Callable[[], Terms] | None = None,
        settled: Callable[[], np.ndarray] | None = None,
    ):
        self.value, self.error, self.arithmetic, self.limit, self._terms = value, error, arithmetic, limit, terms
        self._settled = settled

    def between(self, low: "Bounded", high: "Bounded") -> "Bounded":
        """Return this value with a bound that admits every value from `low` to `high`: see `oracles.ties`."""
        if not self.arithmetic.contract.ties:
            return self
        with np.errstate(invalid="ignore"):
            reach = [abs(end.value - self.value) + end.error for end in (low, high)]
            error = np.maximum(self.error, np.maximum(*reach))
        return Bounded(self.value, np.where(np.isnan(error), np.inf, error), self.arithmetic)

    @property
    def least(self) -> np.ndarray:
        """A lower bound of every computed value; NaN where nothing is known of an infinity."""
        return self.value - self.error if self.limit is None else self.limit

    @property
    def terms(self) -> Terms:
        """The terms of the value: the value itself, where it is free of error, unless a step provided others."""
        return Terms.of(self.value, self.error == 0) if self._terms is None else self._terms()

    @property
    def settled(self) -> np.ndarray:
        """The error of the value as a result of the call, computed by the steps of its definition.

        It is smaller than `error` for one sum, difference or product of inputs, which is rounded once, and for a sum
        that is exact in any order.
        """
        return self.error if self._settled is None else np.minimum(self.error, self._settled())

    def nearest(self, actual: np.ndarray) -> np.ndarray:
        """Return the right values nearest to `actual`, in its shape: here the only one."""
        return self.value

    @property
    def any_length(self) -> bool:
        """Whether results of other lengths may be right too."""
        return False

    def matching_length(self, actual: np.ndarray) -> "Bounded":
        """Return the expectation for a returned `actual`: this array, unless the length of the result is a choice."""
        return self

    def within(self, error: np.ndarray) -> "Bounded":
        """Return the same result with another bound."""
        return Bounded(self.value, error, self.arithmetic)

    @classmethod
    def exact(cls, value: np.ndarray, arithmetic: Arithmetic) -> Self:
        """Return an input of the call, which is free of error."""
        return cls(value, np.zeros_like(value), arithmetic)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of value and error."""
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of the value, in which the oracle computes; it is wider than the arithmetic."""
        return self.value.dtype

    def rearrange(self, move: Callable[[np.ndarray], np.ndarray]) -> "Bounded":
        """Return the array with its elements, and their errors, rearranged by `move` like those of a plain array."""
        limit = None if self.limit is None else move(self.limit)
        settled = self._settled
        return Bounded(
            move(self.value),
            move(self.error),
            self.arithmetic,
            limit,
            settled=None if settled is None else lambda: move(settled()),
        )

    def __setitem__(self, key: Any, item: Any) -> None:
        key, item = selecting(key), lift(item, self.arithmetic)
        self.value[key], self.error[key] = item.value, item.error
        self._settled = None
        if self.limit is not None:
            with np.errstate(invalid="ignore"):
                self.limit[key] = item.least
        # Arrays computed from the former values evaluate their terms lazily, so these must not change.
        self._terms = functools.partial(Terms.unknown, self.value)

    def copy(self) -> "Bounded":
        """As numpy.ndarray.copy."""
        return self.rearrange(np.copy)

    def astype(self, dtype: Any) -> "Bounded":
        """Return a copy, if the type holds every number of the arithmetic.

        Rounding to a narrower type is a step with an error of its own, not a conversion of types.

        Raises:
            NoRule: for types of integers, and for narrower types.
        """
        kind = np.dtype(dtype)
        if kind.kind != "f" or np.finfo(kind).eps / 2 > self.arithmetic.roundoff:
            raise NoRule(f"astype({kind}) would round: no rule says how. `stored` rounds to the type of the tensors")
        return self.copy()

    def clip(self, min: Any = None, max: Any = None) -> Any:
        """As numpy.ndarray.clip."""
        return np.clip(self, min, max)

    argmax = as_method(np.argmax)
    argmin = as_method(np.argmin)
    cumsum = as_method(np.cumsum)
    dot = as_method(np.dot)
    max = as_method(np.max)
    min = as_method(np.min)
    prod = as_method(np.prod)
    std = as_method(np.std)
    var = as_method(np.var)


class OneOf(Bounded):
    """A chosen result, such as the largest numbers or their places: not rounded, and not necessarily unique.

    Args:
        value: one of the right results, named in messages.
        nearest: maps a returned array to the nearest right result of the same shape. Without it, `value` alone is
            right.
        any_length: whether right results may differ in length, for example where the number of kept boxes is a choice.
            `nearest` then takes a returned array of any shape, and returns a result of its own length.
    """

    __slots__ = ("_any_length", "_nearest")

    def __init__(
        self,
        value: np.ndarray,
        arithmetic: Arithmetic,
        nearest: Callable[[np.ndarray], np.ndarray] | None = None,
        any_length: bool = False,
    ) -> None:
        super().__init__(value, np.zeros(value.shape), arithmetic)
        self._nearest, self._any_length = nearest, any_length

    def nearest(self, actual: np.ndarray) -> np.ndarray:
        """Return the right result nearest to `actual`."""
        return self.value if self._nearest is None else self._nearest(actual)

    @property
    def any_length(self) -> bool:
        """Whether results of other lengths may be right too."""
        return self._any_length

    def matching_length(self, actual: np.ndarray) -> Bounded:
        """Return the right result nearest to `actual`, where results differ in length; else this."""
        return OneOf(self.nearest(actual), self.arithmetic) if self._any_length else self

    def within(self, error: np.ndarray) -> "OneOf":
        """Return the same results with a bound."""
        result = OneOf(self.value, self.arithmetic, self._nearest, self._any_length)
        result.error = error
        return result


def stored(a: Any) -> Any:
    """Round `a` to the storage type, at the cost of a step that passes through memory or a tensor core.

    Plain arrays, and arithmetics that store results in the type of the computation, pass unchanged.
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


def contract_of(a: Any) -> Contract:
    """Return what an array leaves open; nothing for a plain one."""
    return a.arithmetic.contract if isinstance(a, Bounded) else DOCUMENTED


# For `scaling_allowance`.
IN_GRADIENTS = 6


def scaling_allowance(a: Any, roundings: int = 2) -> Any:
    """Return `a` with the error of kernels that scale before they subtract, like torch's: ``a * scale - mean * scale``.

    A deviation from the mean then has the rounding error of its operands even where it is 0, as for a single number.
    This project's own kernels subtract first: for them `a` passes unchanged, as plain arrays do.

    Args:
        a: the numbers.
        roundings: the number of roundings of a number of their size: two in the forward pass. The gradient, which torch
            computes as ``x * p + g * q + r``, where r contains a product of the mean and p, takes `IN_GRADIENTS`.
    """
    if not contract_of(a).reassociation:
        return a
    with np.errstate(all="ignore"):
        return Bounded(a.value, a.error + roundings * a.arithmetic.roundoff * abs(a.value), a.arithmetic)


def unspecified_where(a: Bounded, mask: np.ndarray) -> Bounded:
    """Return `a`, unbounded where the mask is set."""
    return Bounded(a.value, np.where(mask, np.inf, a.error), a.arithmetic)


def rounded_step(rule: Rule, result: Any) -> Any:
    """Return the result of a step, rounded where the arithmetic rounds each step."""
    if rule.selects or not isinstance(result, Bounded) or not result.arithmetic.rounds_each_step:
        return result
    return stored(result)


def certain(compared: Comparison) -> np.ndarray:
    """Return the outcome of a comparison that selects elements.

    Raises:
        HangsOnRounding: the outcome depends on rounding.
    """
    if compared.uncertain.any():
        raise HangsOnRounding("a comparison depends on rounding errors: only numpy.where can admit both outcomes")
    return compared.outcome


def selecting(key: Any) -> Any:
    """Return an index into plain arrays: each comparison in it is replaced by its outcome."""
    if isinstance(key, tuple):
        return tuple(map(selecting, key))
    return certain(key) if isinstance(key, Comparison) else key


def lift(x: Any, arithmetic: Arithmetic) -> Bounded:
    """Convert an operand to `Bounded`; a constant that the arithmetic cannot represent is rounded once."""
    if isinstance(x, Bounded):
        return x
    if isinstance(x, Comparison):
        return Bounded(x.outcome.astype(np.float64), x.uncertain.astype(np.float64), arithmetic)
    if (type(x) is float or type(x) is int) and abs(x) <= 2**53:
        return _constant(x, math.copysign(1.0, x), arithmetic)
    return _plain(x, arithmetic)


@functools.lru_cache(maxsize=1024)
def _constant(x: float, sign: float, arithmetic: Arithmetic) -> Bounded:
    """Return a cached constant; `sign` distinguishes the two equal zeros."""
    lifted = _plain(x, arithmetic)
    if arithmetic.rounds_each_step:  # torch rounds a Python number to the tensor's dtype, on the CPU
        lifted = stored(lifted)
    lifted.value.flags.writeable = lifted.error.flags.writeable = False
    return lifted


def _plain(x: Any, arithmetic: Arithmetic) -> Bounded:
    # Twice the digits of the arithmetic, or the most available.
    wide = np.float64 if np.finfo(np.float64).eps <= arithmetic.roundoff**2 else np.longdouble
    value = np.asarray(x, dtype=np.promote_types(x.dtype, wide) if isinstance(x, np.ndarray) else wide)
    digits = np.frexp(value)[0] / arithmetic.roundoff
    error = np.where((digits == np.rint(digits)) | np.isnan(value), 0, abs(value) * arithmetic.roundoff)
    return Bounded(value, error, arithmetic)


def truth(x: Any, arithmetic: Arithmetic) -> Comparison:
    """Convert an operand of a logical function to `Comparison`: plain arrays are certain, numbers true if not 0."""
    if isinstance(x, Bounded):
        return x != 0.0
    if isinstance(x, Comparison):
        return x
    outcome = np.asarray(x, dtype=bool)
    return Comparison(outcome, np.zeros_like(outcome), arithmetic)
