"""Draw what is declared of an operation's arguments: arrays of a tensor, values of a parameter."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fourfold.inputs import arrays
from fourfold.inputs.arrays import FEW_ELEMENTS, generators
from fourfold.numerics.dtypes import DType
from fourfold.operations.arguments import Place, Ragged, TensorInput, Values
from fourfold.operations.axes import Shape

# The range of float32's normal numbers.
LEAST, MOST = float(np.finfo(np.float32).smallest_normal), float(np.finfo(np.float32).max)
# The patterns of a tensor's integers: any, all equal, only the two ends of the range, or consecutive.
PATTERNS = ("any", "any", "constant", "ends", "ascending")
# The ways in which samples share the rows of a ragged batch.
SHARES = ("any", "any", "equal", "one_has_all", "most_are_empty")
# The number of places from which that of a tied parameter's value is drawn.
PLACES = 60


def make_array(
    tensor: TensorInput, rng: np.random.Generator, shape: Shape, dtype: DType, sizes: Mapping[str, int], kind: str = ""
) -> np.ndarray:
    """Return a random array.

    Args:
        tensor: the tensor's description.
        rng: the source of its numbers.
        shape: its shape.
        dtype: the tested dtype.
        sizes: the sizes of the named axes.
        kind: one of its `kinds`. For integers, one of `PATTERNS`, or "least", "largest" or "others" to make all of them
            the least, the largest, or the first of its `also`. The default is the first kind, and for integers a
            uniform distribution.
    """
    place = int(rng.integers(2))
    own_dtype = tensor.dtype(dtype, 0 if tensor.is_floating else place)  # `draw_array` draws of all float8 dtypes
    stored_dtype = own_dtype.numpy
    if tensor.make is not None:
        return _require_shape(np.asarray(tensor.make(rng, shape, stored_dtype)), shape, stored_dtype)
    if tensor.is_floating:
        return arrays.values(rng, shape, own_dtype, kind or tensor.kinds[0])
    return _integers(rng, shape, *tensor.range(sizes), tensor.also, kind or "even").astype(stored_dtype)


def draw_array(
    tensor: TensorInput, dtype: DType, shape: Shape, sizes: Mapping[str, int], place: int
) -> st.SearchStrategy[np.ndarray]:
    """Return a strategy of arrays of a shape, for these sizes of the named axes and this place of the argument."""
    size = int(np.prod(shape, dtype=np.int64))
    if tensor.is_floating and tensor.special and tensor.make is None:
        own_dtypes = [tensor.dtype(dtype, i) for i in range(max(len(tensor.dtypes), 1))]
        strategies = [arrays.arrays(own_dtype, shape, tensor.kinds, place) for own_dtype in own_dtypes]
        return strategies[0] if len(strategies) == 1 else st.one_of(strategies)
    kinds = tensor.kinds if tensor.is_floating else PATTERNS
    rngs = generators(place)
    bulk = st.builds(lambda rng, how: make_array(tensor, rng, shape, dtype, sizes, how), rngs, st.sampled_from(kinds))
    if tensor.make is not None or tensor.is_floating or not 0 < size <= FEW_ELEMENTS:
        return bulk
    low, high = tensor.range(sizes)
    element = st.one_of(st.integers(low, high - 1), *([st.sampled_from(tensor.also)] if tensor.also else []))
    flat = st.lists(element, min_size=size, max_size=size)
    small = st.builds(
        lambda numbers, kind: np.array(numbers, kind).reshape(shape), flat, st.sampled_from(tensor.dtypes)
    )
    return st.one_of(small, bulk)


def other_integers(tensor: TensorInput, array: np.ndarray) -> np.ndarray | None:
    """Return other integers that are as valid as those of an array, or None if none are known.

    Those of a ragged batch are the lengths or the offsets of the same samples in reverse order.
    """
    if isinstance(tensor, Ragged):
        return reverse_offsets(array) if tensor.are_offsets else array[::-1].copy()
    return np.flip(array).copy() if tensor.example or not (tensor.is_floating or tensor.make) else None


def _require_shape(array: np.ndarray, shape: Shape, dtype: np.dtype) -> np.ndarray:
    if array.shape != shape:
        raise ValueError(f"make of a tensor returned shape {list(array.shape)}, where {list(shape)} was asked for")
    return array.astype(dtype)


def reverse_offsets(offsets: np.ndarray) -> np.ndarray:
    """Return the offsets of a ragged batch with its samples in reverse order."""
    return np.ascontiguousarray((offsets[-1] - offsets)[::-1])


def draw_value(spec: Values) -> st.SearchStrategy[Any]:
    """Return a strategy of a parameter's values, or of the `Place` of a tied one.

    Numbers too small for float32 become 0; too large ones are dropped.
    """
    if spec.tied is not None:
        return st.integers(0, PLACES).map(lambda place: Place(place / PLACES))
    if spec.strategy is None:
        return st.sampled_from(spec.choices)
    return spec.strategy.map(_flush_subnormal).filter(_is_no_overflow)


def _flush_subnormal(value: Any) -> Any:
    """Return 0 for a number that is too small for float32, or subnormal there: a GPU may round it to 0.

    A kernel computes with its parameters in float32, and 0 times infinity is not 1e-60 times infinity.
    """
    return value * 0 if isinstance(value, float) and 0 < abs(value) < LEAST else value


def _is_no_overflow(value: Any) -> bool:
    return not (isinstance(value, float) and MOST < abs(value) < math.inf)


def share_rows(rng: np.random.Generator, total: int, samples: int, limit: int | None, shares: str) -> np.ndarray:
    """Return each sample's share of `total` rows, at most `limit`. `shares` is one of `SHARES`."""
    if not samples:
        return np.zeros(0, np.int64)
    weights = np.ones(samples)
    if shares == "one_has_all":
        weights = np.zeros(samples)
        weights[rng.integers(samples)] = 1
    elif shares == "most_are_empty":
        weights = np.where(rng.random(samples) < 0.2, 1.0, 0.0)
        weights[rng.integers(samples)] = 1
    elif shares == "any":
        weights = rng.exponential(1, samples)
    counts = rng.multinomial(total, weights / weights.sum())
    if shares == "equal":  # samples without a row lie between others, and the last one has a row
        counts = np.diff(total * np.arange(samples + 1) // samples)
    return counts if limit is None else np.minimum(counts, limit)


def _integers(rng: np.random.Generator, shape: Shape, low: int, high: int, also: Sequence[int], how: str) -> np.ndarray:
    """Return integers from `low` to below `high`. Those of `also` replace none, some or all of them."""
    size = int(np.prod(shape, dtype=np.int64))
    if not size:
        return np.zeros(shape, np.int64)
    if how == "constant":
        numbers = np.full(size, rng.integers(low, high))
    elif how in ("least", "largest"):
        numbers = np.full(size, low if how == "least" else high - 1)
    elif how == "others":
        return np.full(shape, also[0], np.int64)
    elif how == "ends":
        numbers = rng.choice([low, high - 1], size)
    elif how == "ascending":
        numbers = low + np.arange(size) % (high - low)
    else:
        numbers = rng.integers(low, high, size)
        if high - low > 2 and how == "even" and size > 1:  # the end of a long axis is rarely met by chance
            numbers[-1] = high - 1
        if high - low == 2 and how == "any":  # such as a mask: few or many ones, not always half
            numbers = low + (rng.random(size) < rng.choice([0.0, 0.1, 0.5, 0.9, 1.0]))
    if also:
        share = 0.2 if how == "even" else rng.choice([0.0, 0.2, 0.2, 1.0])
        numbers = np.where(rng.random(size) < share, rng.choice(also, size), numbers)
    return numbers.reshape(shape).astype(np.int64)
