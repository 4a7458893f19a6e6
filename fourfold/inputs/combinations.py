"""Combined cases: sizes, layouts, numbers, parameters and modes, without leaving any pair of them to chance.

A generated case mixes them at random, so a given pair is rare, such as a long row with only the weight misaligned.
Here a few cases, the same in every run, contain each pair of choices: see `covering`.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from fourfold.inputs.arrays import repeat_first
from fourfold.inputs.covering import covering
from fourfold.inputs.hard_numbers import CHANGES, Change, precise
from fourfold.inputs.large_cases import CALL, LargeCases
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations import axes as notation
from fourfold.operations.axes import LEADING, Shape
from fourfold.operations.case import Case, is_floating
from fourfold.operations.layouts import COMPOSED, parts, writable
from fourfold.operations.record import Operation, reference

# Sizes that are all multiples of 16, so that every tensor can be read by vectors, and sizes that are all odd.
VECTORS, ODD = ((16, 32, 48, 16), (17, 33, 5, 21))
# If the product of these sizes is larger than `MODEST`, the axes that are last in no tensor get smaller sizes.
MODEST = 40_000
FEW_VECTORS, FEW_ODD = ((16, 4, 4, 4), (17, 3, 5, 3))
# The sizes of a long axis, several blocks of any usual size: one in whole vectors, one not. The other axes of such a
# call have the sizes `SHORT`, or `SHORTER` if the call would be expensive.
LONG, SHORT, SHORTER = (2064, 2051), (5, 6, 3, 4), (2, 3, 2, 2)
# The leading axes of a case whose tensors have six or more axes.
SIX_AXES: Shape = (2, 3, 2, 2, 2, 2)
# The most constants past `LONG` that each axis gets, and the most sets of parameters.
PAST, PARAMETERS = 2, 6
# The budget of a check's cases together, in the price of `LargeCases`.
BUDGET = 2_500_000
# A case that costs more than `DEAR`, such as thousands of rows with a program each, is made once for each axis, with
# precise numbers and no other choices. A case that costs more than `DEAREST` is left out.
DEAR, DEAREST = 70_000, 300_000
# The other dtypes take one case in `EVERY`, each dtype from a different start.
EVERY = 5
# The number of modes that are combined: the first of `checks.modes`.
MODES = 6


@dataclass(frozen=True)
class Combined:
    """A combined case, and the number of the mode in which it is called."""

    name: str
    case: Case
    mode: int


@dataclass(frozen=True)
class _Size:
    name: str
    sizes: Mapping[str, int]
    price: float
    leading: Shape | None = None


def combined_cases(large: LargeCases) -> Iterator[Combined]:
    """Yield the combined cases of an operation that lie within an implementation's claims, for one dtype."""
    operation, dtype = large.operation, large.dtype
    sizes = _sizes(large) if operation.sized is not None and large.every_nth else []
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
    budget, uses, turns = float(BUDGET), Counter[str](), Counter[str]()
    for place, (size, layout, change, arguments, mode) in enumerate(rows):
        if not _is_taken(large, place) or size.price > budget:
            continue
        plain = make_case(operation, dtype, size.sizes, size.leading, arguments)
        if plain is None:
            continue
        kind = f"{size.name}_{change.__name__}"
        with_numbers = _change_numbers(operation, dtype, plain, change, place, uses[kind])
        case = _set_layouts(operation, with_numbers, layout[turns[str(layout)] % len(layout)])
        turns[str(layout)] += 1
        if large.claims.outside(operation, case, dtype) is None:
            budget -= size.price
            uses[kind] += 1
            yield Combined(f"{kind}_{place}", large.claims.adapt(case), mode)


def _is_taken(large: LargeCases, place: int) -> bool:
    """Return whether a dtype takes the case at a place. float32, or else the first claimed dtype, takes the most."""
    interval = large.every_nth if large.is_first else EVERY
    return place % interval == list(DTYPES).index(large.dtype.name) % interval


def _sizes(large: LargeCases) -> list[_Size]:
    """Return the sizes: whole vectors, odd sizes, each axis long, past the source's constants, and six axes."""
    sized = large.operation.sized
    assert sized is not None
    axes = list(sized.axes)
    ends = notation.last(map(notation.parse, large.operation.axes.values()))

    def sizes_of(name: str, goal: Mapping[str, int], leading: Shape | None = None, long: str = "") -> Iterator[_Size]:
        # An axis whose size is not allowed gets the size that it has beside a long axis.
        sizes = {
            axis: size if large.allows({**sized.axes, axis: size}) else sized.axes[axis] for axis, size in goal.items()
        }
        if (not long or sizes[long] == goal[long]) and large.allows(sizes):
            # Along an axis that is the last one of some tensor, rows do not have a program each.
            price = CALL + max(_elements(large, sizes), sized.largest(sizes)) if long in ends else large.price(sizes)
            yield _Size(name, sizes, price, leading)

    combinations: list[_Size] = []
    for name, of_few, of_many in (("vectors", FEW_VECTORS, VECTORS), ("odd", FEW_ODD, ODD)):
        many = dict(zip(axes, itertools.cycle(of_many)))
        last, inner = itertools.cycle(of_many), itertools.cycle(of_few[1:])
        few = {axis: next(last) if axis in ends else next(inner) for axis in axes}
        combinations += sizes_of(name, many if np.prod([*many.values()]) <= MODEST else few)
    constants = sorted((int(c.value) for c in large.constants.sizes if c.value > max(LONG)), reverse=True)
    for axis in axes:
        others = _other_sizes(axes, axis, SHORT)
        if _elements(large, {**others, axis: max(LONG)}) > DEAR:
            others = _other_sizes(axes, axis, SHORTER)
        past = [c + 1 for c in constants if large.allows({**sized.axes, axis: c + 1})][:PAST]
        for size in (*LONG, *past):
            combinations += sizes_of(f"{_axis_label(axis)}_{size}", {**others, axis: size}, long=axis)
    if LEADING in axes:
        long_rows = {axis: 3 + i for i, axis in enumerate(axes)} | {LEADING: int(np.prod(SIX_AXES))}
        combinations += sizes_of("six_axes", long_rows, SIX_AXES, LEADING)
    return combinations


def _other_sizes(axes: list[str], long: str, sizes: tuple[int, ...]) -> dict[str, int]:
    """Return the sizes of the other axes beside a long one."""
    return {other: sizes[i % len(sizes)] for i, other in enumerate(axis for axis in axes if axis != long)}


def _elements(large: LargeCases, sizes: Mapping[str, int]) -> float:
    """Return the number of elements of all inputs together, without those that have an axis of unknown size."""
    count = 0.0
    for axes in map(notation.parse, large.operation.axes.values()):
        if sizes.keys() >= {*notation.names(axes), *({LEADING} & {*axes})}:
            shape = notation.shape(axes, sizes, (sizes[LEADING],) if LEADING in axes else ())
            count += float(np.prod([size for size in shape if size]))
    return count


def _axis_label(axis: str) -> str:
    return "rows" if axis == LEADING else axis


def _layouts(names: list[str]) -> list[tuple[dict[str, str], ...]]:
    """Return the choices of layouts: all contiguous, each tensor alone misaligned, and composed layouts for all.

    A choice of composed layouts has two alternatives, which take turns: it hardly matters to a kernel which one it
    gets, and this way every composed layout is used.
    """
    composed = list(COMPOSED)

    def mix(turn: int) -> dict[str, str]:
        return {name: composed[(turn + 3 * place) % len(composed)] for place, name in enumerate(names)}

    misaligned = [({name: "misaligned"},) for name in names]
    return [({},), *misaligned, *((mix(turn), mix(turn + 1)) for turn in range(0, len(composed), 2))]


def _parameters(operation: Operation, dtype: DType, first: Case) -> list[Mapping[str, Any]]:
    """Return the distinct parameters of the named examples. Those of the case `first` come first."""
    by_text = {repr(sorted(first.parameters.items())): first.parameters}
    for make in operation.examples.values():
        parameters = make(dtype).parameters
        if parameters.keys() >= first.parameters.keys():
            by_text.setdefault(repr(sorted(parameters.items())), parameters)
    return list(by_text.values())[:PARAMETERS]


def make_case(
    operation: Operation,
    dtype: DType,
    sizes: Mapping[str, int],
    leading: Shape | None = None,
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> Case | None:
    """Return a case of ordinary numbers.

    Args:
        operation: an operation with cases of chosen sizes.
        dtype: the dtype of the case.
        sizes: the sizes of its axes.
        leading: the sizes of the axes that ``...`` stands for, if it is not one axis.
        parameters: replacements for the case's parameters.

    Returns:
        the case, or None if the operation does not accept that many axes.
    """
    sized = operation.sized
    assert sized is not None
    if sized.varied is not None:
        return sized.varied(sizes, leading, parameters)(dtype)
    case = sized.make(sizes)(dtype)
    case = case.with_parameters(**parameters)
    return case if leading is None else _split_leading(operation, dtype, case, leading)


def _split_leading(operation: Operation, dtype: DType, case: Case, leading: Shape) -> Case | None:
    """Split a case's one leading axis into several. Return None if the operation does not accept the split tensors."""
    rows = int(np.prod(leading))
    begins = {name for name, axes in operation.axes.items() if notation.parse(axes)[:1] == (LEADING,)}
    arrays = {name: case[name] for name in begins} | {"grad_output": case.grad_output}
    if not begins or any(array.shape[:1] != (rows,) for array in arrays.values()):
        return None
    split = {name: array.reshape(*leading, *array.shape[1:]) for name, array in arrays.items()}
    grad_output = split.pop("grad_output")
    reshaped = replace(case, inputs={**case.inputs, **split}, grad_output=grad_output)
    return reshaped if reference(operation, reshaped, dtype).shape == grad_output.shape else None


def _change_numbers(operation: Operation, dtype: DType, case: Case, change: Change, seed: int, turn: int) -> Case:
    """Return the case with other numbers in the inputs that may hold any numbers."""
    free = [n for n, array in case.inputs.items() if is_floating(array) and array.size and n not in operation.ordinary]
    if not free:
        return case
    return change(np.random.default_rng(seed), case, dtype, free, turn)


def _set_layouts(operation: Operation, case: Case, layouts: Mapping[str, str]) -> Case:
    """Return the case in layouts. Expanded tensors that may hold any numbers become constant along their first axis."""
    inputs, grad_output = dict(case.inputs), case.grad_output
    layouts = writable(layouts, operation.mutates)
    for name, layout in layouts.items():
        if "expanded" in parts(layout):
            if name == "grad_output":
                grad_output = repeat_first(grad_output)
            elif name in inputs and is_floating(inputs[name]) and name not in operation.ordinary:
                inputs[name] = repeat_first(inputs[name])
    present = {name: layout for name, layout in layouts.items() if name in inputs or name == "grad_output"}
    return Case(inputs, grad_output, case.parameters, present)
