"""Cases with one strange number in them, at any place, and with cotangents that are hardly there.

A kernel that treats NaN, an infinity or a subnormal number wrongly at one place only, in a vector's last lane or a
block's tail, gives itself away when that place holds the only one there is: among many, others hide it.
"""

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from properties.array_strategies import SEEDS
from properties.case import Case
from properties.dtypes import DType

NOT_FINITE = (np.nan, np.inf, -np.inf)


def special_values(dtype: DType, parameters: Mapping[str, Any]) -> dict[str, float]:
    """Numbers at which kernels go wrong, by name: of the type, and those that meet one of the call's parameters."""
    found = {
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
    # As eps, which a value may equal: then either side of a clamp holds.
    found |= {name: float(value) for name, value in parameters.items() if isinstance(value, float)}
    return found


def one_special(rng: np.random.Generator, dtype: DType, array: np.ndarray, parameters: Mapping[str, Any]) -> np.ndarray:
    """An array, which is not empty, with one of `special_values` at one place; half of the time it is not finite.

    The first element and the last, which are a vector's head and a block's tail, are as often the place as all others.
    """
    anywhere = int(rng.integers(array.size))
    at = rng.choice([0, array.size - 1, anywhere, anywhere])
    others = list(special_values(dtype, parameters).values())
    changed = array.copy()
    changed.flat[at] = np.float64(rng.choice(NOT_FINITE if rng.random() < 0.5 else others)).astype(dtype.numpy)
    return changed


def not_finite_in_turn(rng: np.random.Generator, cols: int, dtype: DType) -> np.ndarray:
    """Random rows ``[3 * cols, cols]``, each with one number that is not finite: each of the three at each place."""
    rows = rng.normal(0, 2, (len(NOT_FINITE), cols, cols))
    for kind, value in enumerate(NOT_FINITE):
        np.fill_diagonal(rows[kind], value)
    return rows.reshape(-1, cols).astype(dtype.numpy)


def strange_cotangent(
    rng: np.random.Generator, dtype: DType, given: np.ndarray, parameters: Mapping[str, Any]
) -> np.ndarray:
    """A cotangent, which is not empty, made all zero, all zero but for one, or with one of `special_values`."""
    kind = rng.integers(3)
    if kind == 2:
        return one_special(rng, dtype, given, parameters)
    changed = np.zeros_like(given)
    if kind:
        changed.flat[rng.integers(given.size)] = -1.5
    return changed


@st.composite
def with_special_values(draw: st.DrawFn, dtype: DType, cases: st.SearchStrategy[Case]) -> Case:
    """Cases of a strategy, some of them with one strange number in an input, some with a strange cotangent."""
    case = draw(cases)
    if not draw(st.booleans()):
        return case
    # By the case, not by draws: Hypothesis varies one thing at a time, and what is rare would come in runs, or never.
    contents = b"".join(array.tobytes() for array in (*case.inputs.values(), case.grad_output))
    rng = np.random.default_rng([draw(SEEDS), zlib.crc32(contents)])
    where = rng.choice(["input", "cotangent"])
    inputs = [name for name, array in case.inputs.items() if array.size and not np.issubdtype(array.dtype, np.integer)]
    if where == "input" and inputs:
        name = str(rng.choice(inputs))
        changed = one_special(rng, dtype, case[name], case.parameters)
        case = replace(case, inputs={**case.inputs, name: changed})
    if where == "cotangent" and case.grad_output.size:
        case = replace(case, grad_output=strange_cotangent(rng, dtype, case.grad_output, case.parameters))
    return case
