"""Declarations of an operation's arguments: the axes and numbers of a tensor, or the values of a parameter."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from fourfold.inputs import arrays
from fourfold.inputs.arrays import FEW_ELEMENTS, GENERATORS, KINDS, LIMITED
from fourfold.numerics.dtypes import COMPUTE, DTYPES, INTEGERS, QUANTISED, DType, is_chosen, name_of, returned
from fourfold.operations import axes as notation
from fourfold.operations.axes import Axes, Shape

# The range of float32's normal numbers.
LEAST, MOST = float(np.finfo(np.float32).smallest_normal), float(np.finfo(np.float32).max)
# The patterns of a tensor's integers: any, all equal, only the two ends of the range, or consecutive.
PATTERNS = ("any", "any", "constant", "ends", "ascending")
# The ways in which samples share the rows of a ragged batch.
SHARES = ("any", "any", "equal", "one_has_all", "most_are_empty")
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

    def range(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return the least integer, and the integer past the largest."""
        if self.dtypes == ("bool",):
            return 0, 2
        assert self.high is not None
        return self.low, sizes[self.high] if isinstance(self.high, str) else self.high

    def made(
        self, rng: np.random.Generator, shape: Shape, dtype: DType, sizes: Mapping[str, int], how: str = ""
    ) -> np.ndarray:
        """Return a random array.

        Args:
            rng: the source of its numbers.
            shape: its shape.
            dtype: the tested dtype.
            sizes: the sizes of the named axes.
            how: one of `kinds`. For integers, one of `PATTERNS`, or "least", "largest" or "others" to make all of them
                the least, the largest, or the first of `also`. The default is the first kind, and for integers a
                uniform distribution.
        """
        own = self.dtype(dtype, int(rng.integers(2)))
        kept = own.numpy
        if self.make is not None:
            return self._checked(np.asarray(self.make(rng, shape, kept)), shape, kept)
        if self.is_floating:
            return arrays.values(rng, shape, own, how or self.kinds[0])
        return _integers(rng, shape, *self.range(sizes), self.also, how or "even").astype(kept)

    def drawn(self, dtype: DType, shape: Shape, sizes: Mapping[str, int]) -> st.SearchStrategy[np.ndarray]:
        """Return a strategy of arrays of a shape, for these sizes of the named axes."""
        size = int(np.prod(shape, dtype=np.int64))
        if self.is_floating and self.special and self.make is None:
            return arrays.arrays(self.dtype(dtype), shape, self.kinds)
        ways = self.kinds if self.is_floating else PATTERNS
        bulk = st.builds(lambda rng, how: self.made(rng, shape, dtype, sizes, how), GENERATORS, st.sampled_from(ways))
        if self.make is not None or self.is_floating or not 0 < size <= FEW_ELEMENTS:
            return bulk
        low, high = self.range(sizes)
        element = st.one_of(st.integers(low, high - 1), *([st.sampled_from(self.also)] if self.also else []))
        flat = st.lists(element, min_size=size, max_size=size)
        few = st.builds(lambda found, kind: np.array(found, kind).reshape(shape), flat, st.sampled_from(self.dtypes))
        return st.one_of(few, bulk)

    def other_integers(self, array: np.ndarray) -> np.ndarray | None:
        """Return other integers that are as valid as those of an array, or None if none are known."""
        return np.flip(array).copy() if not self.is_floating and self.make is None else None

    def _checked(self, array: np.ndarray, shape: Shape, kept: np.dtype) -> np.ndarray:
        if array.shape != shape:
            raise ValueError(f"make of a tensor returned shape {list(array.shape)}, where {list(shape)} was asked for")
        return array.astype(kept)


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

    def other_integers(self, array: np.ndarray) -> np.ndarray:
        """Return the lengths or the offsets of the same samples in reverse order."""
        return reversed_offsets(array) if self.are_offsets else array[::-1].copy()


def reversed_offsets(offsets: np.ndarray) -> np.ndarray:
    """Return the offsets of a ragged batch with its samples in reverse order."""
    return np.ascontiguousarray((offsets[-1] - offsets)[::-1])


@dataclass(frozen=True)
class Values:
    """The values of a parameter: see `values`."""

    choices: tuple[Any, ...] = ()
    strategy: st.SearchStrategy[Any] | None = None

    def drawn(self) -> st.SearchStrategy[Any]:
        """Return the values as a strategy. Drawn numbers too small for float32 become 0; too large ones are dropped."""
        if self.strategy is None:
            return st.sampled_from(self.choices)
        return self.strategy.map(_without_subnormal).filter(_is_no_overflow)


def _without_subnormal(value: Any) -> Any:
    """Return 0 for a number that is too small for float32, or subnormal there: a GPU may round it to 0.

    A kernel computes with its parameters in float32, and 0 times infinity is not 1e-60 times infinity.
    """
    return value * 0 if isinstance(value, float) and 0 < abs(value) < LEAST else value


def _is_no_overflow(value: Any) -> bool:
    return not (isinstance(value, float) and MOST < abs(value) < math.inf)


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
) -> TensorInput:
    """Declare a tensor argument of an operation.

    Args:
        axes: ``"... cols"``, ``"batch heads seq dim"``, ``"rows 4"``, ``"batch+1"``: see `fourfold.operations.axes`.
        dtype: a dtype or its name: an integer dtype, bool, float8, or a floating-point dtype that the tensor keeps
            whatever dtype is tested. For a list of integer dtypes, each case uses one of them. The default is the
            tested dtype.
        low: the least integer. The default is 0, or the least of the dtype for int8 without `high`.
        high: the integer past the largest, as in `torch.randint`. The name of an axis declares indices into that axis.
            The default for int8 and uint8 is the end of the dtype.
        also: integers outside the range that may occur, too, such as -100 for "ignored".
        kind: the kind of a floating-point tensor's numbers: one or several of `KINDS` or `LIMITED` in
            `fourfold.inputs.arrays`. The default is all of `KINDS`.
        make: a function that makes the array from a NumPy generator, a shape and a NumPy dtype.
        optional: whether the argument may be None.
        gradient: whether the operation has a gradient with respect to the tensor. Integers and float8 have none.
        special: whether NaN, infinities and other special values may occur. By default they occur only if neither
            `kind` nor `make` limits the numbers.

    Raises:
        TypeError: `axes` is not a string.
        ValueError: an argument does not fit. The message names it.
    """
    dtypes = tuple(map(name_of, (dtype,) if isinstance(dtype, str | torch.dtype) else dtype or ()))
    kinds = (kind,) if isinstance(kind, str) else tuple(kind or KINDS)
    known = (*INTEGERS, *QUANTISED, *DTYPES)
    if unknown := [name for name in dtypes if name not in known]:
        raise ValueError(
            f"dtype must be among {', '.join(known)}, or left out for the tested dtype, not {unknown[0]!r}"
        )
    if len(dtypes) > 1 and any(name not in INTEGERS for name in dtypes):
        raise ValueError(f"dtype may list integer dtypes only, not {', '.join(dtypes)}")
    if unknown := [name for name in kinds if name not in (*KINDS, *LIMITED)]:
        raise ValueError(f"kind must be among {', '.join((*KINDS, *LIMITED))}, not {unknown[0]!r}")
    integers = bool(dtypes) and dtypes[0] in INTEGERS
    whole = integers and dtypes != ("bool",)
    if whole and high is None and len(dtypes) == 1 and dtypes[0] in ("int8", "uint8"):
        ends = np.iinfo(dtypes[0])
        low, high = int(ends.min) if low is None else low, int(ends.max) + 1
    if whole and high is None and make is None:
        raise ValueError(
            f"high must be given for a tensor of {dtypes[0]}: a number, or the axis that it is an index of"
        )
    if not whole and (high is not None or also or low):
        raise ValueError("low, high and also are for tensors of integers")
    low = low or 0
    for name in dtypes if whole else ():
        ends = np.iinfo(name)
        for argument, number in [("low", low), *(("also", each) for each in also), ("high", high)]:
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
    )


@dataclass(frozen=True)
class Output:
    """One output of a definition: see `result`."""

    dtype: Any = None
    gradient: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.dtype, torch.dtype):
            object.__setattr__(self, "dtype", name_of(self.dtype))
        if self.dtype not in (None, COMPUTE, *DTYPES, *QUANTISED, *INTEGERS):
            known = ", ".join((*DTYPES, *QUANTISED, *INTEGERS, COMPUTE))
            raise ValueError(f"the dtype of a result must be among {known}, or None, not {self.dtype!r}")
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


def values(*choices: Any) -> Values:
    """Declare the values of a parameter: one or more of them, or one Hypothesis strategy.

    Named cases take the default from the definition's signature, or else the first value.

    Raises:
        ValueError: no value is given.
    """
    if not choices:
        raise ValueError("values takes at least one value, or a Hypothesis strategy")
    if isinstance(choices[0], st.SearchStrategy):
        return Values((), choices[0])
    return Values(choices)


def lengths(axis: str, *, total: str, most: str | None = None, dtype: str | Sequence[str] = "int64") -> Ragged:
    """Declare an integer tensor with the number of rows of each sample of a ragged batch, 0 or more.

    Args:
        axis: the axis of samples.
        total: the axis of all samples' rows together.
        most: an axis whose size limits the rows of each sample.
        dtype: "int64" or "int32", or both.
    """
    return _ragged(axis, total, most, dtype, are_offsets=False)


def offsets(axis: str, *, total: str, most: str | None = None, dtype: str | Sequence[str] = "int64") -> Ragged:
    """Declare the offsets of a ragged batch: each sample's start and the last one's end, ``axis + 1`` integers from 0.

    Args: as in `lengths`. ``axis`` is the axis of samples, and the tensor is one longer.
    """
    return _ragged(axis, total, most, dtype, are_offsets=True)


def _ragged(axis: str, total: str, most: str | None, dtype: str | Sequence[str], are_offsets: bool) -> Ragged:
    dtypes = (dtype,) if isinstance(dtype, str) else tuple(dtype)
    for what, name in (("axis", axis), ("total", total), *([("most", most)] if most else [])):
        if notation.names(notation.parse(name)) != (name,):
            raise ValueError(f"{what} must be the name of one axis, not {name!r}")
    if not dtypes or not set(dtypes) <= {"int64", "int32"}:
        raise ValueError(f"dtype must be int64 or int32, not {dtype!r}")
    axes = notation.parse(f"{axis}+1" if are_offsets else axis)
    return Ragged(axes=axes, dtypes=dtypes, total=total, most=most, are_offsets=are_offsets, special=False)


def shared(rng: np.random.Generator, total: int, samples: int, most: int | None, how: str) -> np.ndarray:
    """Return each sample's share of `total` rows, at most `most`. `how` is one of `SHARES`."""
    if not samples:
        return np.zeros(0, np.int64)
    weights = np.ones(samples)
    if how == "one_has_all":
        weights = np.zeros(samples)
        weights[rng.integers(samples)] = 1
    elif how == "most_are_empty":
        weights = np.where(rng.random(samples) < 0.2, 1.0, 0.0)
        weights[rng.integers(samples)] = 1
    elif how == "any":
        weights = rng.exponential(1, samples)
    counts = rng.multinomial(total, weights / weights.sum())
    if how == "equal":
        counts = np.full(samples, total // samples)
        counts[: total % samples] += 1
    return counts if most is None else np.minimum(counts, most)


def _integers(rng: np.random.Generator, shape: Shape, low: int, high: int, also: Sequence[int], how: str) -> np.ndarray:
    """Return integers from `low` to below `high`. Those of `also` replace none, some or all of them."""
    size = int(np.prod(shape, dtype=np.int64))
    if not size:
        return np.zeros(shape, np.int64)
    if how == "constant":
        found = np.full(size, rng.integers(low, high))
    elif how in ("least", "largest"):
        found = np.full(size, low if how == "least" else high - 1)
    elif how == "others":
        return np.full(shape, also[0], np.int64)
    elif how == "ends":
        found = rng.choice([low, high - 1], size)
    elif how == "ascending":
        found = low + np.arange(size) % (high - low)
    else:
        found = rng.integers(low, high, size)
        if high - low == 2 and how == "any":  # such as a mask: few or many ones, not always half
            found = low + (rng.random(size) < rng.choice([0.0, 0.1, 0.5, 0.9, 1.0]))
    if also:
        share = 0.2 if how == "even" else rng.choice([0.0, 0.2, 0.2, 1.0])
        found = np.where(rng.random(size) < share, rng.choice(also, size), found)
    return found.reshape(shape).astype(np.int64)
