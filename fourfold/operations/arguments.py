"""What an operation's arguments are: the one description that records, argument checks and operator schemas use.

A tensor has axes, and perhaps a dtype of its own; a parameter has values. `tensor`, `tensors`, `values`, `tied`,
`divisors`, `lengths` and `offsets` make these descriptions, for users' operations and for this library's.
"""

import builtins
import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fourfold.numerics.dtypes import COMPUTE, DTYPES, INTEGERS, QUANTISED, DType, is_chosen, name_of, names_of, returned
from fourfold.operations import axes as notation
from fourfold.operations.axes import Axes, Shape

# The kinds of a floating-point tensor's numbers: see `fourfold.inputs.arrays.values`.
KINDS = ("normal", "whole", "constant", "offset", "spread", "huge", "tiny")
# A kind to declare beside these: normal numbers, a share of them -inf, as attention masks scores.
MASKED = "masked"
# Kinds of numbers within a range, for inputs on which the operation is defined only there.
LIMITED = ("positive", "unit", "probabilities")
# A function that makes an array of a shape and dtype from random numbers.
MakeArray = Callable[[np.random.Generator, Shape, np.dtype], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class TensorInput:
    """A tensor argument of an operation: see `tensor`, `lengths` and `offsets`."""

    axes: Axes
    dtypes: tuple[str, ...] = ()  # empty: the tested dtype
    low: int = 0
    high: int | str | None = None
    also: tuple[int, ...] = ()
    kinds: tuple[str, ...] = KINDS
    make: MakeArray | None = None
    optional: bool = False
    gradient: bool = True
    special: bool = True
    says: str | None = None
    example: tuple[int, ...] = ()

    @property
    def is_floating(self) -> bool:
        """Whether it holds floating-point numbers, of the tested or of another dtype."""
        return not self.dtypes or self.dtypes[0] not in INTEGERS

    @property
    def has_gradient(self) -> bool:
        """Whether the operation has a gradient with respect to this input."""
        return self.gradient and not any(map(is_chosen, self.dtypes))

    def dtype(self, tested: DType, place: int = 0) -> DType:
        """Return its dtype if `tested` is tested. `place` chooses among several declared dtypes."""
        return returned(tested, self.dtypes[place % len(self.dtypes)] if self.dtypes else None)

    @property
    def limiting_axes(self) -> dict[str, str]:
        """The axes whose sizes limit the integers, by the name of the field."""
        fields = {field: getattr(self, field, None) for field in ("high", "total", "most")}
        return {field: axis for field, axis in fields.items() if isinstance(axis, str)}

    def range(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return the least integer, and the integer past the largest."""
        if self.dtypes == ("bool",):
            return 0, 2
        assert self.high is not None
        return self.low, sizes[self.high] if isinstance(self.high, str) else self.high


@dataclass(frozen=True)
class TensorList:
    """An argument that is a list of tensors: see `tensors`."""

    tensor: TensorInput
    least: int
    most: int

    def items(self, name: str) -> dict[str, TensorInput]:
        """Return the description of each possible tensor, by names such as ``xs[0]``."""
        high, axes = self.tensor.high, self.tensor.axes
        return {
            f"{name}[{place}]": replace(
                self.tensor,
                axes=notation.item_axes(axes, place),
                high=notation.item_axes([high], place)[0] if isinstance(high, str) else high,
            )
            for place in range(self.most)
        }


@dataclass(frozen=True, kw_only=True)
class Ragged(TensorInput):
    """The lengths or the offsets of the samples of a ragged batch: see `lengths` and `offsets`."""

    total: str
    most: str | None
    are_offsets: bool

    @property
    def samples(self) -> str:
        """The name of the axis of samples."""
        return notation.names(self.axes)[0]

    def of_counts(self, counts: Sequence[int] | np.ndarray, place: int = 0) -> np.ndarray:
        """Return the lengths or the offsets of samples from the number of rows of each."""
        numbers = np.concatenate([[0], np.cumsum(counts)]) if self.are_offsets else np.asarray(counts)
        return numbers.astype(self.dtypes[place % len(self.dtypes)])


@dataclass(frozen=True)
class Values:
    """The values of a parameter: see `values`, `tied` and `divisors`."""

    choices: tuple[Any, ...] = ()
    strategy: Any = None  # a Hypothesis strategy
    out_of_range: Mapping[str, Any] = field(default_factory=dict)
    of_another_type: Mapping[str, Any] = field(default_factory=dict)
    range: tuple[float, float] | None = None
    tied: Callable[..., Any] | None = None
    takes: tuple[str, ...] = ()  # the axes and ragged tensors that `tied` takes
    valid: Callable[[Any], str | None] | None = None  # what is expected in place of a value, or None if it is valid

    @property
    def kind(self) -> type:
        """The type of the choices other than None."""
        return next((type(choice) for choice in self.choices if choice is not None), type(None))

    @property
    def optional(self) -> bool:
        """Whether the parameter may be None."""
        return None in self.choices

    def check(self, name: str, value: Any) -> None:
        """Check a value of the parameter.

        Raises:
            TypeError: it has another type than the choices.
            ValueError: it is out of range.
        """
        if value is None and self.optional:
            return
        kind = self.kind
        # torch.compile passes its symbols in place of numbers.
        symbols = {float: (float, int, torch.SymFloat, torch.SymInt), int: (int, torch.SymInt), tuple: (tuple, list)}
        types = symbols.get(kind, (kind,))
        if not isinstance(value, types) or (isinstance(value, bool) and kind is int):
            expected = "number" if kind is float else kind.__name__
            or_none = " or None" if self.optional else ""
            raise TypeError(
                f"{name} must be {'an' if kind is int else 'a'} {expected}{or_none}, not {type(value).__name__}"
            )
        if kind is tuple:
            of_item, items = type(self.choices[0][0]), tuple(value)  # type: ignore[arg-type]
            if any(type(item) is not of_item for item in items):
                raise TypeError(f"{name} must be a tuple of {of_item.__name__}, not {value!r}")
        if self.valid is not None and (problem := self.valid(value)):
            raise ValueError(f"{name} must be {problem}, not {value!r}")

    def of_call(self, call: Mapping[str, Any]) -> list[Any]:
        """Return the values of a tied parameter for the sizes of axes and the ragged tensors of a call, by name.

        Raises:
            ValueError: there is none, or the user's function raises an error.
        """
        assert self.tied is not None
        call_values = {name: call[name] for name in self.takes}
        arguments = ", ".join(
            f"{name}={v.tolist() if isinstance(v, torch.Tensor) else v}" for name, v in call_values.items()
        )
        try:
            values = self.tied(**call_values)
        except Exception as error:
            raise ValueError(f"its function raises {type(error).__name__} for {arguments}: {error}") from error
        choices = list(values) if isinstance(values, list | tuple | builtins.range) else [values]
        if not choices:
            raise ValueError(f"its function gives no value for {arguments}; `sizes` can exclude such sizes")
        return [choice.item() if isinstance(choice, torch.Tensor | np.generic) else choice for choice in choices]


@dataclass(frozen=True)
class Place:
    """A place among the choices of a tied parameter: 0 for the first, 1 for the last one."""

    share: float

    @staticmethod
    def choose(choices: Sequence[Any], value: Any) -> Any:
        """Return the value at a place, or the wanted value if it is a choice, or else the largest one below it."""
        if isinstance(value, Place):
            return choices[round(value.share * (len(choices) - 1))]
        if value in choices:
            return value
        numbers = isinstance(value, int | float) and all(isinstance(choice, int | float) for choice in choices)
        return max((choice for choice in choices if numbers and choice < value), default=choices[0])


def tensor(
    axes: str,
    *,
    dtype: str | torch.dtype | Sequence[str | torch.dtype] | None = None,
    low: int | None = None,
    high: int | str | None = None,
    also: Sequence[int] = (),
    kind: str | Sequence[str] | None = None,
    make: MakeArray | None = None,
    optional: bool = False,
    gradient: bool = True,
    special: bool | None = None,
    says: str | None = None,
) -> TensorInput:
    """Declare a tensor argument of an operation.

    Args:
        axes: ``"... cols"``, ``"batch heads seq dim"``, ``"rows 4"``, ``"batch+1"``: see `fourfold.operations.axes`.
        dtype: a dtype or its name: an integer dtype, bool, float8, or a floating-point dtype that the tensor keeps
            whatever dtype is tested. For a list of integer dtypes, or of float8 dtypes, each case uses one of them.
            The default is the tested dtype.
        low: the least integer. The default is 0, or the least of the dtype for int8 without `high`.
        high: the integer past the largest, as in `torch.randint`. The name of an axis declares indices into that axis.
            The default for int8 and uint8 is the end of the dtype.
        also: integers outside the range that may occur, too, such as -100 for "ignored".
        kind: the kind of a floating-point tensor's numbers: one or several of `KINDS`, `MASKED` or `LIMITED`. The
            default is all of `KINDS`.
        make: a function that makes the array from a NumPy generator, a shape and a NumPy dtype.
        optional: whether the argument may be None.
        gradient: whether the operation has a gradient with respect to the tensor. Integers and float8 have none.
        special: whether NaN, infinities and other special values may occur. By default they occur only if neither
            `kind` nor `make` limits the numbers.
        says: the text by which the message of an error must name the argument, if its name is an English word.

    Raises:
        TypeError: `axes` is not a string, or `dtype` no dtype.
        ValueError: an argument does not fit. The message names it.
    """
    try:
        dtypes = () if dtype is None else names_of(dtype)
    except TypeError as error:
        raise TypeError(f"dtype: {error}") from None
    kinds = (kind,) if isinstance(kind, str) else tuple(kind or KINDS)
    dtype_names = (*INTEGERS, *QUANTISED, *DTYPES)
    if unknown := [name for name in dtypes if name not in dtype_names]:
        raise ValueError(
            f"dtype must be among {', '.join(dtype_names)}, or left out for the tested dtype, not {unknown[0]!r}"
        )
    if len(dtypes) > 1 and not any(all(name in of for name in dtypes) for of in (INTEGERS, QUANTISED)):
        raise ValueError(f"dtype may list either integer dtypes or float8 dtypes only, not {', '.join(dtypes)}")
    if unknown := [name for name in kinds if name not in (*KINDS, MASKED, *LIMITED)]:
        raise ValueError(f"kind must be among {', '.join((*KINDS, MASKED, *LIMITED))}, not {unknown[0]!r}")
    integers = bool(dtypes) and dtypes[0] in INTEGERS
    is_number = integers and dtypes != ("bool",)
    if is_number and high is None and len(dtypes) == 1 and dtypes[0] in ("int8", "uint8"):
        ends = np.iinfo(dtypes[0])
        low, high = int(ends.min) if low is None else low, int(ends.max) + 1
    if is_number and high is None and make is None:
        raise ValueError(
            f"high must be given for a tensor of {dtypes[0]}: a number, or the axis that it is an index of"
        )
    if not is_number and (high is not None or also or low):
        raise ValueError("low, high and also are for tensors of integers")
    low = low or 0
    for name in dtypes if is_number else ():
        ends = np.iinfo(name)
        for argument, number in [("low", low), *(("also", n) for n in also), ("high", high)]:
            if isinstance(number, int) and not ends.min <= number <= ends.max + (argument == "high"):
                raise ValueError(f"{argument} must fit into {name}, not be {number}")
    if integers and kind is not None:
        raise ValueError("kind is for floating-point tensors; low and high say which integers there are")
    limited = make is not None or any(name in LIMITED for name in kinds)
    return TensorInput(
        axes=notation.parse(axes),
        dtypes=dtypes,
        low=low,
        high=high,
        also=tuple(also),
        kinds=kinds,
        make=make,
        optional=optional,
        gradient=gradient,
        special=not limited if special is None else special,
        says=says,
    )


def tensors(axes: str, *, count: tuple[int, int] = (0, 4), **options: Any) -> TensorList:
    """Declare an argument that is a list of tensors. All lists of a call have the same number of them.

    Args:
        axes: the axes of each tensor: see `tensor`. Each has its own size of an axis such as ``n[i]``, and they share
            all other sizes. Axes ``n[i]`` of two lists have the same size at the same place.
        count: the least and the largest number of tensors in a case.
        **options: those of `tensor`, except `optional`.

    Raises:
        TypeError: there is no such option.
        ValueError: an argument does not fit. The message names it.
    """
    if "optional" in options:
        raise TypeError("tensors takes no option optional: count says how few tensors there may be")
    if not (isinstance(count, tuple) and len(count) == 2 and all(type(n) is int for n in count)):
        raise ValueError(f"count must be a pair of the least and the largest number of tensors, not {count!r}")
    low, high = count
    if not 0 <= low <= high or not high:
        raise ValueError(f"count must be a pair (least, largest) of 0 or more, not {count!r}")
    return TensorList(tensor(axes, **options), low, high)


def integers(axes: str, *example: int, dtype: str | Sequence[str] = "int64", optional: bool = False) -> TensorInput:
    """Declare a tensor of any integers by an example, whose numbers are repeated to fill any shape."""
    axes_of, dtypes = notation.parse(axes), names_of(dtype)
    return TensorInput(axes=axes_of, dtypes=dtypes, example=example, optional=optional, special=False)


@dataclass(frozen=True)
class Output:
    """One output of a definition: see `result`."""

    dtype: Any = None
    gradient: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.dtype, torch.dtype):
            object.__setattr__(self, "dtype", name_of(self.dtype))
        if self.dtype not in (None, COMPUTE, *DTYPES, *QUANTISED, *INTEGERS):
            dtype_names = ", ".join((*DTYPES, *QUANTISED, *INTEGERS, COMPUTE))
            raise ValueError(f"the dtype of a result must be among {dtype_names}, or None, not {self.dtype!r}")
        if is_chosen(self.dtype):
            object.__setattr__(self, "gradient", False)


def result(dtype: str | torch.dtype | None = None, *, gradient: bool = True) -> Output:
    """Declare one of several outputs.

    Args:
        dtype: a dtype or its name, or "compute", the dtype in which kernels compute: float64 for float64, and float32
            for all others. The default is the definition's own dtype for integers, booleans and float8, and the tested
            dtype for all other results.
        gradient: whether gradients flow through the output. Statistics that a kernel returns mostly have none, and
            integers, booleans and float8 never have one.

    Raises:
        ValueError: there is no such dtype.
    """
    return Output(dtype, gradient)


def values(
    *choices: Any,
    out_of_range: Mapping[str, Any] | None = None,
    of_another_type: Mapping[str, Any] | None = None,
    range: tuple[float, float] | None = None,
) -> Values:
    """Declare the values of a parameter: one or more of them, or one Hypothesis strategy.

    Named cases take the default from the definition's signature, or else the first value.

    Args:
        choices: the values, or the strategy.
        out_of_range: bad values for which a ValueError must be raised, by the names of their defects.
        of_another_type: bad values for which a TypeError must be raised.
        range: two numbers, between which any number is valid.

    Raises:
        ValueError: no value is given.
    """
    if not choices:
        raise ValueError("values takes at least one value, or a Hypothesis strategy")
    result = Values((), choices[0]) if _is_strategy(choices[0]) else Values(choices)
    return replace(result, out_of_range=out_of_range or {}, of_another_type=of_another_type or {}, range=range)


def tied(function: Callable[..., Any]) -> Values:
    """Declare a parameter whose values depend on the sizes, or on the ragged batch, of the call.

    Args:
        function: returns the value, or a list of the values, that the parameter may have in a call. Each of its
            arguments is named after an axis, whose size it gets, or after a `lengths` or `offsets`, whose integer
            tensor it gets.

    Raises:
        TypeError: it is no function, or its arguments cannot be given by their names.
    """
    if not callable(function):
        raise TypeError(f"tied takes a function of sizes, not {function!r}")
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tied: the function's argument {name} cannot be given by its name")
    return Values(tied=function, takes=tuple(parameters))


def divisors(axis: str, *choices: int) -> Values:
    """Declare a parameter that divides the size of an axis, such as the number of groups of channels.

    Args:
        axis: the name of the axis.
        choices: the values of which each call has one that divides; by default every divisor.

    Raises:
        ValueError: a choice is not a positive integer.
    """
    for choice in choices:
        if type(choice) is not int or choice < 1:
            raise ValueError(f"divisors of {axis} must be positive integers, not {choice!r}")

    @functools.lru_cache(maxsize=1024)
    def dividing(size: int) -> tuple[int, ...]:
        return tuple(number for number in sorted(choices) or range(1, max(size, 1) + 1) if size % number == 0)

    return Values(tied=lambda **sizes: dividing(sizes[axis]), takes=(axis,))


def number(
    *choices: float | None,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> Values:
    """Declare a finite number between two limits, by one or more of its values: an integer if these are integers.

    The values past each limit, and values of another type, are declared errors.

    Args:
        choices: the values; None among them if the parameter may be None.
        above: the limit below all valid numbers.
        least: the least valid number.
        below: the limit above all valid numbers.
        most: the largest valid number.

    Raises:
        ValueError: a choice is not within the limits.
    """
    numbers = [choice for choice in choices if choice is not None]
    are_integers = all(type(choice) is int for choice in numbers)
    tests: dict[str, tuple[float | None, Callable[[Any, Any], bool]]] = {
        "above": (above, operator.gt),
        "at least": (least, operator.ge),
        "below": (below, operator.lt),
        "at most": (most, operator.le),
    }
    limits = [(limit, test) for limit, test in tests.values() if limit is not None]
    conditions = [f"{name} {limit}" for name, (limit, _) in tests.items() if limit is not None]
    expected = " and ".join(conditions if are_integers else ["finite", *conditions])

    def valid(value: Any) -> str | None:
        is_valid = all(test(value, limit) for limit, test in limits) and (are_integers or -math.inf < value < math.inf)
        return None if is_valid else expected

    low = next((limit for limit in (above, least) if limit is not None), -math.inf)
    high = next((limit for limit in (below, most) if limit is not None), math.inf)
    out_of_range = {} if above is None else {"at_the_limit": above}
    out_of_range |= {"below": low - abs(numbers[0] or 1)} if low > -math.inf else {}
    out_of_range |= {} if below is None else {"at_the_upper_limit": below}
    out_of_range |= {} if most is None else {"above": most + (1 if are_integers else 0.5)}
    out_of_range |= {} if are_integers else {"not_a_number": math.nan, "infinite": math.inf, "lowest": -math.inf}
    for choice in numbers:
        if valid(choice):
            raise ValueError(f"a number that must be {expected} cannot be {choice}")
    of_another_type: dict[str, Any] = {"a_string": str(numbers[0])}
    of_another_type |= {"a_bool": True, "no_whole_number": 1.5} if are_integers else {}
    of_another_type |= {"none": None} if len(numbers) == len(choices) else {}
    converted = choices if are_integers else [None if choice is None else float(choice) for choice in choices]
    result = values(*converted, out_of_range=out_of_range, of_another_type=of_another_type)
    # Near a limit that it must not reach, a number such as 1 - limit has few digits.
    return replace(result, range=None if are_integers or below is not None else (low, high), valid=valid)


def positive(*choices: float | None) -> Values:
    """Declare a number that must be above 0 and finite, by one or more of its values."""
    return number(*choices, above=0.0)


def not_negative(*choices: float | None) -> Values:
    """Declare a number that must be 0 or above, and finite, by one or more of its values."""
    return number(*choices, least=0.0)


def one_of(*choices: str | torch.dtype) -> Values:
    """Declare a choice of strings, or of dtypes. Calls with another wrong argument use the first choice."""
    unknown: dict[str, Any] = {"unknown": "no_such_choice"}
    if isinstance(choices[0], torch.dtype):
        candidates = {"float64": torch.float64, "float8": torch.float8_e4m3fn, "integers": torch.int64}
        unknown = {name: dtype for name, dtype in candidates.items() if dtype not in choices}
    options = values(*choices, out_of_range=unknown, of_another_type={"a_number": 1, "none": None})
    return replace(options, valid=lambda value: None if value in choices else f"one of {', '.join(map(str, choices))}")


def flag() -> Values:
    """Declare a choice between False and True."""
    return values(False, True, of_another_type={"a_string": "no", "a_number": 1, "none": None})


def _is_strategy(value: Any) -> bool:
    # A kernel's module imports this one, and has no need of Hypothesis.
    hypothesis = sys.modules.get("hypothesis.strategies")
    return hypothesis is not None and isinstance(value, hypothesis.SearchStrategy)


def lengths(
    axis: str,
    *,
    total: str,
    most: str | None = None,
    dtype: str | Sequence[str] = "int64",
    optional: bool = False,
) -> Ragged:
    """Declare an integer tensor with the number of rows of each sample of a ragged batch, 0 or more.

    Args:
        axis: the axis of samples.
        total: the axis of all samples' rows together.
        most: an axis whose size limits the rows of each sample.
        dtype: "int64" or "int32", or both.
        optional: whether the argument may be None.
    """
    return _make_ragged(axis, total, most, dtype, optional, are_offsets=False)


def offsets(
    axis: str,
    *,
    total: str,
    most: str | None = None,
    dtype: str | Sequence[str] = "int64",
    optional: bool = False,
) -> Ragged:
    """Declare the offsets of a ragged batch: each sample's start and the last one's end, ``axis + 1`` integers from 0.

    Args: as in `lengths`. ``axis`` is the axis of samples, and the tensor is one longer.
    """
    return _make_ragged(axis, total, most, dtype, optional, are_offsets=True)


def _make_ragged(
    axis: str, total: str, most: str | None, dtype: str | Sequence[str], optional: bool, are_offsets: bool
) -> Ragged:
    dtypes = (dtype,) if isinstance(dtype, str) else tuple(dtype)
    for argument, name in (("axis", axis), ("total", total), *([("most", most)] if most else [])):
        if notation.names(notation.parse(name)) != (name,):
            raise ValueError(f"{argument} must be the name of one axis, not {name!r}")
    if not dtypes or not set(dtypes) <= {"int64", "int32"}:
        raise ValueError(f"dtype must be int64 or int32, not {dtype!r}")
    axes = notation.parse(f"{axis}+1" if are_offsets else axis)
    return Ragged(
        axes=axes,
        dtypes=dtypes,
        optional=optional,
        total=total,
        most=most,
        are_offsets=are_offsets,
        special=False,
    )
