"""Hypothesis strategies for arrays: their sizes, shapes, values and memory layouts."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from fourfold.numerics.dtypes import QUANTISED, DType
from fourfold.operations.arguments import KINDS, MASKED
from fourfold.operations.layouts import LAYOUTS

# At and next to the sizes of vectors, warps and blocks, with some small and odd sizes.
AWKWARD_SIZES = (0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 511, 513)
AWKWARD_LARGE = (1000, 1023, 1024, 1025, 2047, 2049, 4097)

# The kind of a named case: quantizers and norms divide by what is 0 in it.
ZERO = "zero"
# The kinds of a named case at the ends of a closed range, by the kind with that range.
ENDS = {"unit": "0 or 1", "probabilities": "one-hot"}
# Arrays of at most this many elements are sometimes drawn element by element.
FEW_ELEMENTS = 12
# NONE is the share of arrays without rows. Each small size stands for STEPS drawn numbers, so that 0 is as rare there.
NONE = 1 / 32
STEPS = 16
SEEDS = st.integers(0, 2**32 - 1)
GENERATORS = SEEDS.map(np.random.default_rng)


def generators(place: int) -> st.SearchStrategy[np.random.Generator]:
    """Return a strategy of generators for the argument at a place of a call.

    Hypothesis repeats seeds. By `GENERATORS` two arguments of one call would then have the same numbers.
    """
    return SEEDS.map(lambda seed: np.random.default_rng([seed, place]))


def random_size(rng: np.random.Generator, limit: int) -> int:
    """Return a number of rows up to `limit`: any number, a small one, one next to a block size, or, rarely, 0."""
    if limit == 0 or rng.random() < NONE:
        return 0
    awkward = [size for size in (*AWKWARD_SIZES, *AWKWARD_LARGE) if 0 < size <= limit]
    return int(rng.choice([rng.integers(1, limit + 1), rng.integers(1, min(limit, 8) + 1), rng.choice(awkward)]))


def sizes(limit: int, elements: int | None = None) -> st.SearchStrategy[int]:
    """Return a strategy of numbers of rows: those of `random_size` or, if `elements` is small, integers that shrink.

    Large sizes come from a seed, because Hypothesis repeats a seed less often than a size.
    """
    if (limit if elements is None else elements) <= FEW_ELEMENTS:
        return st.integers(0, limit * STEPS).map(lambda step: -(-step // STEPS))
    return GENERATORS.map(lambda rng: random_size(rng, limit))


@st.composite
def leading_axes(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """Draw the sizes of zero to three leading axes that hold `count` rows together."""
    if count == 1 and draw(st.booleans()):
        return ()
    divisors = [d for d in (2, 3, 5, 7) if count % d == 0] if count else [2]
    if not divisors or draw(st.booleans()):
        return (count,)
    d = draw(st.sampled_from(divisors))
    return draw(st.sampled_from([(d, count // d), (count // d, d), (1, d, count // d)]))


@st.composite
def rows_and_cols(draw: st.DrawFn, elements: int) -> tuple[int, ...]:
    """Draw a shape ``[..., cols]`` of up to `elements` elements: few long rows, or many short ones."""
    if draw(st.booleans()):
        cols = draw(sizes(elements))
        rows = draw(sizes(elements // max(cols, 1), elements))
    else:
        rows = draw(sizes(elements // 4, elements))
        cols = draw(sizes(elements // max(rows, 1), elements))
    return (*draw(leading_axes(rows)), cols)


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, kind: str) -> np.ndarray:
    """Return a random array of a kind of `KINDS`, `MASKED`, `LIMITED`, `ENDS` or `ZERO`, rounded to the dtype."""
    numbers = np.asarray(rng.normal(0, 2, shape))
    if kind == "whole":  # many ties, and exact sums
        numbers = np.rint(numbers)
    elif kind == ZERO:
        numbers = np.zeros(shape)
    elif kind == "constant":
        numbers = np.full(shape, rng.normal(0, 2))
    elif kind == "offset":  # differences are small against the values
        numbers = numbers + rng.choice([-1000, 100, 1000])
    elif kind == "spread":
        numbers = numbers * 2.0 ** rng.integers(-12, 12, shape)
    elif kind == "huge":  # sums and squares overflow
        numbers = np.asarray(rng.uniform(-1, 1, shape)) * dtype.largest
    elif kind == "tiny":  # subnormal numbers
        numbers = numbers * dtype.smallest_subnormal
    elif kind == MASKED:
        numbers = np.where(rng.random(shape) < rng.choice([0.1, 0.5, 0.95]), -np.inf, numbers)
    elif kind == "positive":  # from about 1/500 to 500
        numbers = np.exp(numbers)
    elif kind == "unit":  # between 0 and 1
        numbers = np.asarray(rng.uniform(0, 1, shape))
    elif kind == ENDS["unit"]:
        numbers = np.rint(rng.uniform(0, 1, shape))
    elif kind == "probabilities":  # their sum along the last axis is 1, within rounding
        numbers = np.exp(numbers)
        numbers = numbers / numbers.sum(-1 if shape else None, keepdims=True)
    elif kind == ENDS["probabilities"]:
        numbers = (numbers == numbers.max(-1 if shape else None, keepdims=True, initial=-np.inf)).astype(np.float64)
    if dtype.name in QUANTISED:  # a cast makes numbers past its largest one infinite, or NaN
        numbers = np.clip(numbers, -dtype.largest, dtype.largest)
    return np.asarray(numbers).astype(dtype.numpy)  # arithmetic turns arrays without axes into scalars


def sprinkle_special_values(rng: np.random.Generator, array: np.ndarray, share: float = 0.2) -> np.ndarray:
    """Replace a share of the elements by NaN, an infinity, negative zero or a subnormal number."""
    tiny = float(ml_dtypes.finfo(array.dtype).smallest_subnormal)
    special = rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0, tiny]), array.shape)
    return np.where(rng.random(array.shape) < share, special, array.astype(np.float64)).astype(array.dtype)


@st.composite
def bulk_arrays(
    draw: st.DrawFn, dtype: DType, shape: tuple[int, ...], kinds: Sequence[str] = KINDS, place: int = 0
) -> np.ndarray:
    """Draw an array made from a seed, sometimes with special values. For `place` see `generators`."""
    rng = draw(generators(place))
    array = values(rng, shape, dtype, draw(st.sampled_from(kinds)))
    if draw(st.integers(0, 7)) == 7:
        array = sprinkle_special_values(rng, array)
    return array


@st.composite
def explicit_arrays(draw: st.DrawFn, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """Draw an array element by element, so that a counterexample shrinks to small whole numbers."""
    count = int(np.prod(shape, dtype=np.int64))
    # Whole numbers and halves are exact in every dtype and make many ties.
    element = st.one_of(st.integers(0, 8), st.integers(-16, 16).map(lambda half: half / 2))
    flat = draw(st.lists(element, min_size=count, max_size=count))
    return np.array(flat, dtype=np.float64).reshape(shape).astype(dtype.numpy)


def arrays(
    dtype: DType, shape: tuple[int, ...], kinds: Sequence[str] = KINDS, place: int = 0
) -> st.SearchStrategy[np.ndarray]:
    """Return a strategy of arrays of a shape, made from a seed or, if the elements are few, also drawn one by one.

    For `place` see `generators`.
    """
    if np.prod(shape) <= FEW_ELEMENTS:
        return st.one_of(explicit_arrays(dtype, shape), bulk_arrays(dtype, shape, kinds, place))
    return bulk_arrays(dtype, shape, kinds, place)


def cotangent(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Return a random cotangent, rounded to the dtype: of both signs, a tenth of it zero, no element 1."""
    numbers = np.asarray(rng.normal(0, 2, shape) * (rng.random(shape) < 0.9)).astype(dtype.numpy)
    # A cotangent of ones hides a kernel that ignores it, and half types often round a single element to 1.
    return np.where(numbers == 1, np.array(-1, dtype=dtype.numpy), numbers)


def layouts_for(*names: str) -> st.SearchStrategy[dict[str, str]]:
    """Return a strategy of a layout for each named tensor: all contiguous half of the time, else any mixture."""
    drawn_layouts = st.fixed_dictionaries({name: st.sampled_from(tuple(LAYOUTS)) for name in names})
    return st.one_of(st.just(dict.fromkeys(names, "contiguous")), drawn_layouts)


def repeat_first(array: np.ndarray, axis: int = 0) -> np.ndarray:
    """Repeat the first slice along an axis in place of the others. The layout "expanded" then gives it stride 0."""
    if array.ndim == 0:
        return array
    return np.broadcast_to(array.take([0], axis), array.shape).copy() if array.shape[axis] else array
