"""Combined cases: sizes, layouts, numbers, parameters and modes, such that no pair of them is left to chance.

A generated case has any mixture of them, and a certain pair comes rarely: a long row whose weight alone is misaligned,
say. Here each pair of choices comes in one of few cases, which are the same in every run: see `covering`.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from fourfold.inputs.arrays import repeated
from fourfold.inputs.covering import covering
from fourfold.inputs.hard_numbers import CHANGES, Change, precise
from fourfold.inputs.large_cases import CALL, LargeCases
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations import axes as notation
from fourfold.operations.axes import LEADING, Shape
from fourfold.operations.case import Case, is_floating
from fourfold.operations.layouts import COMPOSED, parts
from fourfold.operations.record import Operation, reference

# All sizes are multiples of 16, so that every tensor may be read by vectors; and none of them is even.
VECTORS, ODD = ((16, 32, 48, 16), (17, 33, 5, 21))
# Where a call of them would have more elements than this, those of axes that are last in no tensor are smaller.
MODEST = 40_000
FEW_VECTORS, FEW_ODD = ((16, 4, 4, 4), (17, 3, 5, 3))
# The sizes of a long axis: of several blocks of any usual size, in whole vectors and not; and of the others then,
# which are shorter where a call would be dear.
LONG, SHORT, SHORTER = (2064, 2051), (5, 6, 3, 4), (2, 3, 2, 2)
# What is left of the leading axes where there are so many that tensors have six axes and more.
SIX_AXES: Shape = (2, 3, 2, 2, 2, 2)
# Cases of constants that are past `LONG`, at most, and of parameters.
PAST, PARAMETERS = 2, 6
# What the cases of a check may cost together, as `LargeCases` counts, in the dtype that has all of them.
BUDGET = 2_500_000
# A case that costs more, as one of thousands of rows with a program each, is made once for each axis.
DEAR, DEAREST = 70_000, 300_000
# In other dtypes every so many of the cases is taken, from another one on in each.
EVERY = 5
# How many places `checks.modes` has.
MODES = 6


@dataclass(frozen=True)
class Combined:
    """A combined case, and in which of several modes it is to be called."""

    name: str
    case: Case
    mode: int


@dataclass(frozen=True)
class _Size:
    name: str
    sizes: Mapping[str, int]
    price: float
    leading: Shape | None = None


def combined(large: LargeCases) -> Iterator[Combined]:
    """The combined cases of an operation for one implementation and dtype, which lie within its claims."""
    operation, dtype = large.operation, large.dtype
    sizes = _sizes(large) if operation.sized is not None and large.every else []
    cheap = [size for size in sizes if size.price <= DEAR]
    if operation.sized is None or not cheap:
        return
    first = operation.sized.make(cheap[0].sizes)(dtype)
    layouts = _layouts([*first.inputs, "grad_output"])
    parameters = _parameters(operation, dtype, first)
    rows = [
        (cheap[size], layouts[layout], CHANGES[change], parameters[parameter], mode)
        for size, layout, change, parameter, mode in covering(
            (len(cheap), len(layouts), len(CHANGES), len(parameters), MODES)
        )
    ]
    dear = [size for size in sizes if DEAR < size.price <= DEAREST]
    rows += [(size, ({},), precise, first.parameters, 0) for size in dear[::2]]
    budget, uses = float(BUDGET), Counter[str]()
    for place, (size, layout, change, given, mode) in enumerate(rows):
        if not _is_taken(large, place) or size.price > budget:
            continue
        plain = made(operation, dtype, size.sizes, size.leading, given)
        if plain is None:
            continue
        kind = f"{size.name}_{change.__name__}"
        changed = _with_numbers(operation, dtype, plain, change, place, uses[kind])
        case = _laid_out(operation, changed, layout[place % len(layout)])
        if large.claims.outside(operation, case, dtype) is None:
            budget -= size.price
            uses[kind] += 1
            yield Combined(f"{kind}_{place}", large.claims.adapted(case), mode)


def _is_taken(large: LargeCases, place: int) -> bool:
    """Whether a dtype has the case at a place: float32 has the most of them, or the first dtype that is claimed."""
    every = large.every if large.is_first else EVERY
    return place % every == list(DTYPES).index(large.dtype.name) % every


def _sizes(large: LargeCases) -> list[_Size]:
    """Of whole vectors, of odd ones, long along each axis, past the constants of the source, and of six axes."""
    sized = large.operation.sized
    assert sized is not None
    axes = list(sized.axes)
    ends = {written[-1] for written in map(notation.parse, large.operation.axes.values()) if written}

    def of(name: str, wanted: Mapping[str, int], leading: Shape | None = None, long: str = "") -> Iterator[_Size]:
        # An axis that may not have its size has the one that it has beside a long axis.
        sizes = {
            axis: size if large.allows({**sized.axes, axis: size}) else sized.axes[axis]
            for axis, size in wanted.items()
        }
        if (not long or sizes[long] == wanted[long]) and large.allows(sizes):
            # Rows along an axis that is the last one of some tensor have no program each.
            price = CALL + max(_elements(large, sizes), sized.largest(sizes)) if long in ends else large.price(sizes)
            yield _Size(name, sizes, price, leading)

    found: list[_Size] = []
    for name, of_few, of_many in (("vectors", FEW_VECTORS, VECTORS), ("odd", FEW_ODD, ODD)):
        chosen = dict(zip(axes, itertools.cycle(of_many)))
        last, inner = itertools.cycle(of_many), itertools.cycle(of_few[1:])
        few = {axis: next(last) if axis in ends else next(inner) for axis in axes}
        found += of(name, chosen if np.prod([*chosen.values()]) <= MODEST else few)
    constants = sorted((int(c.value) for c in large.constants.sizes if c.value > max(LONG)), reverse=True)
    for axis in axes:
        others = _beside(axes, axis, SHORT)
        if _elements(large, {**others, axis: max(LONG)}) > DEAR:
            others = _beside(axes, axis, SHORTER)
        past = [c + 1 for c in constants if large.allows({**sized.axes, axis: c + 1})][:PAST]
        for size in (*LONG, *past):
            found += of(f"{_spoken(axis)}_{size}", {**others, axis: size}, long=axis)
    if LEADING in axes:
        wanted = {axis: 3 + i for i, axis in enumerate(axes)} | {LEADING: int(np.prod(SIX_AXES))}
        found += of("six_axes", wanted, SIX_AXES, LEADING)
    return found


def _beside(axes: list[str], long: str, sizes: tuple[int, ...]) -> dict[str, int]:
    """The sizes of the other axes beside a long one."""
    return {other: sizes[i % len(sizes)] for i, other in enumerate(axis for axis in axes if axis != long)}


def _elements(large: LargeCases, sizes: Mapping[str, int]) -> float:
    """The elements of all inputs together whose axes are among those that have sizes."""
    found = 0.0
    for written in map(notation.parse, large.operation.axes.values()):
        known = [int(axis) if axis.isdecimal() else sizes.get(axis) for axis in written]
        found += float(np.prod([size for size in known if size])) if all(size is not None for size in known) else 0.0
    return found


def _spoken(axis: str) -> str:
    return "rows" if axis == LEADING else axis


def _layouts(names: list[str]) -> list[tuple[dict[str, str], ...]]:
    """All contiguous; each tensor alone misaligned; each tensor in one of the composed layouts, of which two alternate.

    A kernel hardly minds which of the two it is, and all are taken.
    """
    composed = list(COMPOSED)

    def of_each(turn: int) -> dict[str, str]:
        return {name: composed[(turn + 3 * place) % len(composed)] for place, name in enumerate(names)}

    alone = [({name: "misaligned"},) for name in names]
    return [({},), *alone, *((of_each(turn), of_each(turn + 1)) for turn in range(0, len(composed), 2))]


def _parameters(operation: Operation, dtype: DType, first: Case) -> list[Mapping[str, Any]]:
    """Different parameters among the named examples, the first of them those of a case as it is made."""
    found = {repr(sorted(first.parameters.items())): first.parameters}
    for make in operation.examples.values():
        given = make(dtype).parameters
        if given.keys() >= first.parameters.keys():
            found.setdefault(repr(sorted(given.items())), given)
    return list(found.values())[:PARAMETERS]


def made(
    operation: Operation,
    dtype: DType,
    sizes: Mapping[str, int],
    leading: Shape | None = None,
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> Case | None:
    """A case of ordinary numbers.

    Args:
        operation: the operation, which has cases of chosen sizes.
        dtype: of the case.
        sizes: of its axes.
        leading: what ``...`` stands for, if it is not one axis.
        parameters: in place of those that such a case has.

    Returns:
        None if the operation does not take so many axes.
    """
    sized = operation.sized
    assert sized is not None
    if sized.varied is not None:
        return sized.varied(sizes, leading, parameters)(dtype)
    case = sized.make(sizes)(dtype)
    case = case.with_parameters(**parameters)
    return case if leading is None else _of_more_axes(operation, dtype, case, leading)


def _of_more_axes(operation: Operation, dtype: DType, case: Case, leading: Shape) -> Case | None:
    """A case whose one leading axis is several; None if not all tensors begin with it."""
    rows = int(np.prod(leading))
    begins = {name for name, axes in operation.axes.items() if notation.parse(axes)[:1] == (LEADING,)}
    arrays = {name: case[name] for name in begins} | {"grad_output": case.grad_output}
    if not begins or any(array.shape[:1] != (rows,) for array in arrays.values()):
        return None
    split = {name: array.reshape(*leading, *array.shape[1:]) for name, array in arrays.items()}
    grad_output = split.pop("grad_output")
    more = replace(case, inputs={**case.inputs, **split}, grad_output=grad_output)
    return more if reference(operation, more, dtype).shape == grad_output.shape else None


def _with_numbers(operation: Operation, dtype: DType, case: Case, change: Change, seed: int, turn: int) -> Case:
    """The case with other numbers in inputs that may hold any."""
    free = [n for n, array in case.inputs.items() if is_floating(array) and array.size and n not in operation.ordinary]
    if not free:
        return case
    return change(np.random.default_rng(seed), case, dtype, free, turn)


def _laid_out(operation: Operation, case: Case, layouts: Mapping[str, str]) -> Case:
    """The case in layouts; what is expanded holds the same along its first axis, if it may hold any numbers."""
    inputs, grad_output = dict(case.inputs), case.grad_output
    for name, layout in layouts.items():
        if "expanded" in parts(layout):
            if name == "grad_output":
                grad_output = repeated(grad_output)
            elif name in inputs and is_floating(inputs[name]) and name not in operation.ordinary:
                inputs[name] = repeated(inputs[name])
    kept = {name: layout for name, layout in layouts.items() if name in inputs or name == "grad_output"}
    return Case(inputs, grad_output, case.parameters, kept)
