"""Kinds of numbers for combined cases: sums that narrower arithmetic gets wrong, magnitudes, and special values.

Each function changes the inputs of a case, and keeps shapes and dtypes. If an array has several rows along its longest
axis, the rows take the kinds in turn. One case then holds several kinds, and one kind leaves its rows unchanged.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fourfold.numerics.dtypes import DTYPES, DType, dtype_of
from fourfold.operations.case import Case

# A number that 8, 11 and 24 bits cannot hold: half types and TF32 round it, and so does float32 if float64 is tested.
LONG = 1 + 2.0**-8 + 2.0**-11 + 2.0**-24
# The most terms of a sum that are not 0, in a product with few ones among zeros.
FEW_TERMS = 16
# The share of the range of exponents that is used. Correct kernels take third powers, which leave the range beyond it.
SHARE = 0.3
Rows = Callable[[np.random.Generator, np.ndarray, DType], np.ndarray]
Change = Callable[[np.random.Generator, Case, DType, Sequence[str], int], Case]


def digits(roundoff: float) -> int:
    """Return the number of binary digits of a type with this roundoff."""
    return round(-np.log2(roundoff))


def summable(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, terms: int) -> np.ndarray:
    """Return whole numbers of one sign, with the most digits for which each sum of `terms` of them is exact.

    Each number is 1 more than a multiple of 4, so that a type with one digit less rounds all of them to the same side.
    """
    room = digits(dtype.arithmetic.roundoff) - int(np.ceil(np.log2(max(terms, 1))))
    bits = max(min(room, digits(dtype.roundoff)), 3)
    return 2.0 ** (bits - 1) + 4.0 * rng.integers(0, 1 << (bits - 3), shape) + 1


def _whole(rng: np.random.Generator, row: np.ndarray, dtype: DType) -> np.ndarray:
    # Short rows get no larger numbers than long ones, because correct kernels lose digits in exponentials of those.
    half = digits(dtype.arithmetic.roundoff) // 2
    return summable(rng, row.shape, dtype, max(row.size, 1 << (half - 1)))


def _exponents(rng: np.random.Generator, row: np.ndarray, dtype: DType) -> np.ndarray:
    """Return numbers whose exponentials are half of `LONG`, except for one 0 at random."""
    numbers = np.full(row.shape, np.log(LONG / 2))
    numbers[rng.integers(row.size)] = 0
    return numbers


def _long_sum(rng: np.random.Generator, row: np.ndarray, dtype: DType) -> np.ndarray:
    """Return `LONG` and its negative in random order, equally often up to one."""
    return LONG * rng.permutation(np.resize([1.0, -1.0], row.size))


def _nan_last(rng: np.random.Generator, row: np.ndarray, dtype: DType) -> np.ndarray:
    return _replace_element(row, row.size - 1, np.nan)


def _infinity_amid(rng: np.random.Generator, row: np.ndarray, dtype: DType) -> np.ndarray:
    return _replace_element(row, row.size // 2, np.inf)


def _mask_first_half(rng: np.random.Generator, row: np.ndarray, dtype: DType) -> np.ndarray:
    return np.where(np.arange(row.size) < row.size // 2, -np.inf, row)


def _mask_all(rng: np.random.Generator, row: np.ndarray, dtype: DType) -> np.ndarray:
    return np.full(row.shape, -np.inf)


def _nan_amid(rng: np.random.Generator, row: np.ndarray, dtype: DType) -> np.ndarray:
    return _replace_element(row, row.size // 2, np.nan)


def _infinity_last(rng: np.random.Generator, row: np.ndarray, dtype: DType) -> np.ndarray:
    return _replace_element(row, row.size - 1, np.inf)


def _identity(rng: np.random.Generator, row: np.ndarray, dtype: DType) -> np.ndarray:
    return row


def _far_from_zero(rng: np.random.Generator, row: np.ndarray, dtype: DType) -> np.ndarray:
    """Return whole numbers plus a power of 2 that leaves half of the digits to them: small deviations from the mean."""
    return np.round(row) + 2.0 ** (digits(dtype.roundoff) // 2 + 1)


def _replace_element(row: np.ndarray, index: int, value: float) -> np.ndarray:
    copy = row.copy()
    copy[index] = value
    return copy


PRECISE: tuple[Rows, ...] = (_whole, _exponents, _long_sum, _identity, _far_from_zero)
SPECIAL: tuple[Rows, ...] = (
    _nan_last,
    _mask_all,
    _infinity_amid,
    _mask_first_half,
    _identity,
    _nan_amid,
    _infinity_last,
)


def _change_rows(rng: np.random.Generator, array: np.ndarray, kinds: Sequence[Rows], turn: int) -> np.ndarray:
    """Return the array with its rows along the longest axis (the last of equals) changed by the kinds in turn.

    `turn` chooses the kind of a single row.
    """
    if not array.size or not array.ndim:
        return array
    dtype = dtype_of(array.dtype)
    axis = array.ndim - 1 - int(np.argmax(array.shape[::-1]))
    last: np.ndarray = np.moveaxis(array.astype(dtype.wide), axis, -1).copy()
    rows = last.reshape(-1, last.shape[-1])
    for place, row in enumerate(rows):
        kind = kinds[(place + (turn if len(rows) == 1 else 0)) % len(kinds)]
        rows[place] = kind(rng, row, dtype)
    with np.errstate(over="ignore"):
        return np.moveaxis(rows.reshape(last.shape), -1, axis).astype(array.dtype)


def ordinary(rng: np.random.Generator, case: Case, dtype: DType, names: Sequence[str], turn: int) -> Case:
    """Return the case unchanged."""
    return case


def precise(rng: np.random.Generator, case: Case, dtype: DType, names: Sequence[str], turn: int) -> Case:
    """Fill one input with terms that narrower types cannot hold. The others stay, or hold a few ones among zeros.

    With a few ones, a product of both has few terms, and the terms and their sums are exact. The cotangent holds whole
    numbers of one sign, and their sums are exact, too.
    """
    key, is_sparse = names[turn // 2 % len(names)], turn % 2 == 1
    changed = {key: _change_rows(rng, case[key], PRECISE, turn // 2 // len(names))}
    if is_sparse and len(names) > 1:
        changed = {name: _few_ones(rng, case[name]) for name in names}
        changed[key] = summable(rng, case[key].shape, dtype_of(case[key].dtype), FEW_TERMS).astype(case[key].dtype)
    stored = DTYPES[case.grad_output.dtype.name]
    grad_output = np.asarray(-summable(rng, case.grad_output.shape, stored, _longest(case))).astype(stored.numpy)
    return _replace_inputs(case, changed, grad_output)


def _few_ones(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """Return zeros with ones at random places, at most `FEW_TERMS` along each axis, and about half as many."""
    share = FEW_TERMS / 2 / max(FEW_TERMS, *array.shape, 1)
    mask = rng.random(array.shape) < share
    for axis in range(array.ndim):
        mask &= np.cumsum(mask, axis) <= FEW_TERMS
    return mask.astype(np.float64).astype(array.dtype)


def _longest(case: Case) -> int:
    return max((size for array in case.inputs.values() for size in array.shape), default=1)


def _replace_inputs(case: Case, changed: Mapping[str, np.ndarray], grad_output: Any = None) -> Case:
    return replace(
        case,
        inputs={**case.inputs, **changed},
        grad_output=case.grad_output if grad_output is None else grad_output,
    )


def special(rng: np.random.Generator, case: Case, dtype: DType, names: Sequence[str], turn: int) -> Case:
    """Put NaN and infinities into the first half, the middle, the end or all of the rows of one input.

    The first row's kind is another one each time, because a case may have fewer rows than there are kinds.
    """
    key, first = names[turn % len(names)], turn // len(names) % len(SPECIAL)
    return _replace_inputs(case, {key: _change_rows(rng, case[key], SPECIAL[first:] + SPECIAL[:first], 0)})


def magnitudes(rng: np.random.Generator, case: Case, dtype: DType, names: Sequence[str], turn: int) -> Case:
    """Multiply numbers by powers of 2 across the exponent range: slice by slice, input by input, or one by one."""
    if turn % 3 == 0:
        changed = {
            n: _scale(case[n], _along(np.rint(np.linspace(*_ends(case[n]), len(case[n]))), case[n]))
            for n in names
            if case[n].ndim
        }
        return _replace_inputs(case, changed)
    if turn % 3 == 1:
        signs = np.resize([1, -1], len(names)) * (1 if turn % 2 else -1)
        return _replace_inputs(
            case, {name: _scale(case[name], sign * _ends(case[name])[1]) for name, sign in zip(names, signs)}
        )
    key = names[turn % len(names)]
    return _replace_inputs(case, {key: _scale(case[key], np.rint(rng.uniform(*_ends(case[key]), case[key].shape)))})


def _ends(array: np.ndarray) -> tuple[float, float]:
    """Return the least and the largest exponent in the used share of the range of an array's dtype."""
    dtype = dtype_of(array.dtype)
    return np.rint(SHARE * np.log2(dtype.smallest_normal)), np.rint(SHARE * np.log2(dtype.largest))


def _along(exponents: np.ndarray, array: np.ndarray) -> np.ndarray:
    return exponents.reshape(-1, *[1] * (array.ndim - 1))


def _scale(array: np.ndarray, exponents: Any) -> np.ndarray:
    wide: Any = np.longdouble if array.dtype == np.float64 else np.float64
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.ldexp(array.astype(wide), np.asarray(exponents).astype(int))).astype(array.dtype)


CHANGES: tuple[Change, ...] = (ordinary, precise, special, magnitudes)
