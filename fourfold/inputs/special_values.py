"""Cases with one special value at any place of an input, or with a special cotangent, such as zeros.

A kernel may treat NaN, an infinity or a subnormal number wrongly in one place only, such as a vector's last lane or a
block's tail. A special value that stands there alone exposes the mistake; among many of them the others hide it.
"""

import zlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fourfold.inputs.arrays import SEEDS
from fourfold.numerics.dtypes import DTYPES, DType, dtype_of
from fourfold.operations.case import Case, is_floating

NOT_FINITE = (np.nan, np.inf, -np.inf)


def special_values(dtype: DType, parameters: Mapping[str, Any]) -> dict[str, float]:
    """Return numbers at which kernels go wrong, by name: limits of the dtype, and the call's own float parameters."""
    kinds = {
        "negative zero": -0.0,
        "zero": 0.0,
        "NaN": np.nan,
        "infinity": np.inf,
        "negative infinity": -np.inf,
        "largest": dtype.largest,
        "lowest": -dtype.largest,
        "smallest subnormal": dtype.smallest_subnormal,
        "largest subnormal": dtype.smallest_normal - dtype.smallest_subnormal,
        "its square overflows": 1.5 * dtype.largest**0.5,
    }
    # Such as eps: a value that equals it lies at the limit of a clamp.
    kinds |= {name: float(value) for name, value in parameters.items() if isinstance(value, float)}
    return kinds


def insert_special(
    rng: np.random.Generator, dtype: DType, array: np.ndarray, parameters: Mapping[str, Any]
) -> np.ndarray:
    """Put one of `special_values`, at least half of the time NaN or an infinity, at one place of a nonempty array.

    Half of the time the place is the first or the last element: a vector's head or a block's tail.
    """
    place = int(rng.integers(array.size))
    index = rng.choice([0, array.size - 1, place, place])
    finite = list(special_values(dtype, parameters).values())
    copy = array.copy()
    copy.flat[index] = np.float64(rng.choice(NOT_FINITE if rng.random() < 0.5 else finite)).astype(dtype.numpy)
    return copy


def not_finite_in_turn(rng: np.random.Generator, cols: int, dtype: DType) -> np.ndarray:
    """Draw rows ``[3 * cols, cols]`` with one NaN, inf or -inf in each row, and each of the three in each column."""
    rows = rng.normal(0, 2, (len(NOT_FINITE), cols, cols))
    for kind, value in enumerate(NOT_FINITE):
        np.fill_diagonal(rows[kind], value)
    return rows.reshape(-1, cols).astype(dtype.numpy)


def strange_cotangent(
    rng: np.random.Generator, dtype: DType, cotangent: np.ndarray, parameters: Mapping[str, Any]
) -> np.ndarray:
    """Replace a cotangent that is not empty by zeros, or by zeros except one, or insert one of `special_values`."""
    kind = rng.integers(3)
    if kind == 2:
        return insert_special(rng, dtype, cotangent, parameters)
    sparse = np.zeros_like(cotangent)
    if kind:
        sparse.flat[rng.integers(cotangent.size)] = -1.5
    return sparse


@st.composite
def cases_with_special_values(
    draw: st.DrawFn, dtype: DType, cases: st.SearchStrategy[Case], ordinary: Collection[str] = ()
) -> Case:
    """Draw a case. Some get one special value in an input that is not `ordinary`, some a special cotangent."""
    case = draw(cases)
    if not draw(st.booleans()):
        return case
    # The case's contents are part of the seed. Hypothesis varies one draw at a time, and by draws alone a rare choice
    # would come in runs, or never.
    contents = b"".join(array.tobytes() for array in (*case.inputs.values(), case.grad_output))
    rng = np.random.default_rng([draw(SEEDS), zlib.crc32(contents)])
    target = rng.choice(["input", "cotangent"])
    inputs = [n for n, array in case.inputs.items() if array.size and is_floating(array) and n not in ordinary]
    if target == "input" and inputs:
        name = str(rng.choice(inputs))
        with_special = insert_special(rng, dtype_of(case[name].dtype), case[name], case.parameters)
        case = replace(case, inputs={**case.inputs, name: with_special})
    if target == "cotangent" and case.grad_output.size:
        stored = DTYPES[case.grad_output.dtype.name]
        case = replace(case, grad_output=strange_cotangent(rng, stored, case.grad_output, case.parameters))
    return case
