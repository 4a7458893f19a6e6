"""Named cases that follow from a declaration: sizes around blocks, layouts, ranks, parameters, special values."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fourfold.declaration.cases import CallPlan, Declaration, has_range
from fourfold.inputs.arrays import ENDS, ZERO
from fourfold.inputs.special_values import special_values
from fourfold.numerics.dtypes import DTYPES, DType, dtype_of
from fourfold.operations import axes as notation
from fourfold.operations.arguments import Place, Ragged, TensorInput
from fourfold.operations.axes import LEADING, Shape
from fourfold.operations.case import Case
from fourfold.operations.layouts import LAYOUTS
from fourfold.operations.record import Sized

Make = Callable[[DType], Case]
# The sizes of one axis while the others are short: one short of a block, a full block, and one past it.
AROUND_BLOCKS = (127, 128, 129, 1023, 1024, 1025)
LONG = 4096 + 5
# The sizes of axes that are last in some tensor, and of the others, in turn. No two of them are equal. An axis that is
# divided into blocks is longer by a block.
LAST, OTHERS = (33, 40, 17, 26, 65), (5, 3, 4, 7, 6)
# The sizes of the other axes of a call with one long axis.
SHORT = (2, 3)
# The limit on the elements of a case's largest intermediate result. A larger case is not worth its time.
AFFORDABLE = 1 << 18
KINDS_OF_ALL = {
    "constant": "equal_numbers",
    "whole": "whole_numbers",
    "offset": "numbers_far_from_zero",
    "spread": "numbers_of_all_magnitudes",
    "huge": "huge_numbers",
    "tiny": "tiny_numbers",
}


@dataclass(frozen=True, kw_only=True)
class Deviations:
    """The deviations of a named case from the ordinary one."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    leading: Shape | None = None
    counts: Mapping[str, list[int]] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    special: str | None = None  # the input that has special values


class NamedCases:
    """The named cases of a declaration."""

    def __init__(self, declaration: Declaration) -> None:
        self._declaration, self._allowed = declaration, declaration.allowed
        # By the long axes and the sizes of the others: the elements of the largest intermediate result where the long
        # axes have the given sizes, and the power by which it grows with them.
        self._growth: dict[tuple[Any, ...], tuple[int, float, dict[str, int]]] = {}
        last = dict.fromkeys(notation.last(tensor.axes for tensor in declaration.tensors.values()))
        for total, ragged in declaration.ragged.items():  # more rows than samples
            last |= {total: None}
            last.pop(ragged.samples, None)
        self._base: dict[str, int] = {}
        blocks = notation.blocks(tensor.axes for tensor in declaration.tensors.values())
        for axis in declaration.axes:
            choices = LAST if axis in last and axis != LEADING else OTHERS
            last_axes = sum(a in last and a != LEADING for a in self._base)
            place = last_axes if choices is LAST else len(self._base) - last_axes
            self._base[axis] = declaration.allowed[axis].nearest(choices[place % len(choices)] + blocks.get(axis, 0))
        # The axes whose sizes may be chosen, and their sizes in other cases.
        self.axes = {
            axis: allowed.nearest(SHORT[place % len(SHORT)])
            for place, (axis, allowed) in enumerate(declaration.allowed.items())
            if allowed.nearest(SHORT[0]) <= max(SHORT)
            and notation.item_axes([notation.indexed_axis(axis)], 0) == (axis,)
        }

    def examples(self) -> dict[str, Make]:
        """Return all named cases: the ordinary one first, then the others in ascending order of their elements."""
        changes = {"ordinary": Deviations()}
        for cases in (
            self._empty(),
            self._lists(),
            self._sizes(),
            self._ranks(),
            self._ragged_cases(),
            self._layouts(),
        ):
            changes |= {name: d for name, d in cases if name not in changes}
        for cases in (self._parameters(), self._numbers(), self._integers()):
            changes |= {name: d for name, d in cases if name not in changes}
        count = {name: self._elements(d) for name, d in changes.items()}
        order = sorted(changes, key=lambda name: (name != "ordinary", count[name]))
        return {name: self._maker(changes[name]) for name in order}

    def of_sizes(self, sizes: Mapping[str, int]) -> Make:
        """Return a named case of chosen sizes. The other axes have the base sizes of all named cases."""
        return self._maker(Deviations(sizes=sizes))

    def varied(self, sizes: Mapping[str, int], leading: Shape | None, parameters: Mapping[str, Any]) -> Make:
        """Return a named case of chosen sizes, leading axes and parameters."""
        return self._maker(Deviations(sizes=sizes, leading=leading, parameters=parameters))

    def allows(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the declaration allows the sizes, and the case's largest intermediate result is affordable."""
        is_allowed = all(size and self._allowed[axis].nearest(size) == size for axis, size in sizes.items())
        return is_allowed and self.largest(sizes) <= AFFORDABLE

    def filling(self, elements: int, odd: bool = False) -> dict[str, int]:
        """Return equal sizes, as far as the declaration allows, whose product is about `elements`.

        The product of all axes is also what a contraction computes. A call with a larger intermediate result than that
        has shorter axes.
        """
        upper = {axis: self._allowed[axis].nearest(elements) for axis in self.axes}
        while True:
            sizes: dict[str, int] = {}
            for axis in sorted(upper, key=lambda axis: upper[axis]):  # a short axis leaves more to the others
                side = (elements / math.prod(sizes.values())) ** (1 / (len(upper) - len(sizes)))
                even = self._allowed[axis].nearest(1 << max(round(math.log2(side)), 1))
                sizes[axis] = self._allowed[axis].nearest(even - odd)
            if elements < 2 or self.largest(sizes) <= 4 * elements:
                return sizes
            elements //= 4

    def largest(self, sizes: Mapping[str, int]) -> float:
        """Estimate the number of elements of the largest intermediate result from calls with shorter long axes."""
        low, high = 32, 64
        long = tuple(axis for axis, size in sizes.items() if size > high)
        short = {axis: size for axis, size in sizes.items() if axis not in long}
        key = (*long, *sorted(short.items()))
        if key not in self._growth:
            lengths = [{axis: self._allowed[axis].nearest(end) for axis in long} for end in (low, high)]
            smaller, larger = (max(self._run(Deviations(sizes={**short, **longer})), 1) for longer in lengths)
            steps = [np.log(lengths[1][axis] / max(lengths[0][axis], 1)) for axis in long]
            power = np.log(larger / smaller) / np.mean(steps) if any(steps) else 0.0
            self._growth[key] = larger, max(power, 0.0), lengths[1]
        larger, power, longer = self._growth[key]
        scale = np.exp(np.mean([np.log(sizes[axis] / max(longer[axis], 1)) for axis in long])) if long else 1.0
        return float(larger * scale**power)

    # ---- sizes

    def _lists(self) -> Iterator[tuple[str, Deviations]]:
        for count in (
            dict.fromkeys((*self._declaration.counts[:3], self._declaration.counts[-1]))
            if self._declaration.lists
            else ()
        ):
            yield f"lists_of_{count}", Deviations(parameters=self._declaration.list_arguments(count))
        for first in range(2):
            # A kernel takes some tensors at a time: an empty one may be the last of them.
            ends = tuple(f"[{place}]" for place in range(first, self._declaration.counts[-1], 2))
            empty = {axis: 0 for axis, e in self._allowed.items() if axis.endswith(ends) and e.nearest(0) == 0}
            if empty:
                parameters = self._declaration.list_arguments(self._declaration.counts[-1])
                yield f"empty_from_{first}", Deviations(sizes=empty, parameters=parameters)

    def _axes(self) -> list[str]:
        """Return the axes; of the axes of a list's tensors, only those of the first two tensors."""
        return [
            axis
            for axis in self._declaration.axes
            if axis == notation.indexed_axis(axis) or axis.endswith(("[0]", "[1]"))
        ]

    def _empty(self) -> Iterator[tuple[str, Deviations]]:
        axes = [axis for axis in self._axes() if self._allowed[axis].nearest(0) == 0]
        if axes:
            empty = [axis for axis in self._declaration.axes if self._allowed[axis].nearest(0) == 0]
            yield "no_elements", Deviations(sizes=dict.fromkeys(empty, 0))
        for axis in axes:
            if self._plan(Deviations(sizes={axis: 0})).sizes[axis] == 0:
                yield f"no_{_axis_label(axis)}", Deviations(sizes={axis: 0})

    def _sizes(self) -> Iterator[tuple[str, Deviations]]:
        ones = {axis: self._allowed[axis].nearest(1) for axis in self._declaration.axes}
        yield "one_element", Deviations(sizes=ones, leading=() if ones.get(LEADING) == 1 else None)
        for axis in self._axes():
            smallest = self._allowed[axis].nearest(1)
            yield f"{_axis_label(axis)}_{smallest}", Deviations(sizes={axis: smallest})
            shorts = [a for a in self._declaration.axes if a != axis]
            short = {o: self._allowed[o].nearest(SHORT[i % len(SHORT)]) for i, o in enumerate(shorts)}
            for size in (*AROUND_BLOCKS, LONG):
                nearest = self._allowed[axis].nearest(size)
                if self.largest({**short, axis: nearest}) <= AFFORDABLE:
                    yield f"{_axis_label(axis)}_{nearest}", Deviations(sizes={**short, axis: nearest})

    def _run(self, deviations: Deviations) -> int:
        plan = self._plan(deviations)
        inputs = self._declaration.make_inputs(plan, np.random.default_rng(0), DTYPES["float32"], {})
        return self._declaration.infer_shape(inputs, plan.parameters).largest

    def _ranks(self) -> Iterator[tuple[str, Deviations]]:
        if LEADING not in self._declaration.axes:
            return
        extent = self._allowed[LEADING]
        turns = ("transposed", "axes_reversed")
        names = [*self._names(), "grad_output"]
        in_turn = {name: turns[place % 2] for place, name in enumerate(names)}
        ranks = {
            "without_leading_axes": Deviations(leading=()),
            "two_leading_axes": Deviations(leading=(3, 4)),
            "three_leading_axes": Deviations(leading=(2, 3, 4)),
            "two_leading_axes_each_in_another_order": Deviations(leading=(3, 4), layouts=in_turn),
            "three_leading_axes_each_in_another_order": Deviations(leading=(3, 2, 5), layouts=in_turn),
        }
        for name, axes in ranks.items():
            rows = int(np.prod(axes.leading or (), dtype=np.int64))
            if extent.nearest(rows) == rows:
                yield name, axes
        last = {axis: self._allowed[axis].nearest(3) for axis in self._declaration.axes if axis != LEADING}
        short = {**last, LEADING: extent.nearest(700)}
        if self.largest(short) <= AFFORDABLE:
            yield "many_short_rows", Deviations(sizes=short)

    def _ragged_cases(self) -> Iterator[tuple[str, Deviations]]:
        batches = {
            "no_samples": [],
            "samples_all_empty": [0, 0, 0],
            "empty_samples_at_both_ends": [0, 0, 3, 0, 2, 0],
            "samples_of_one_row": [1] * 70,
            "one_full_sample_among_empty": [0] * 20 + [129] + [0] * 20,
            "samples_alike": [7] * 9,
            "one_sample": [257],
        }
        for total, ragged in self._declaration.ragged.items():
            for name, counts in batches.items():
                if self._allowed[ragged.samples].nearest(len(counts)) != len(counts):
                    continue
                if self._allowed[total].nearest(sum(counts)) == sum(counts):
                    limits = {ragged.most: max(counts, default=1) + 1} if ragged.most else {}
                    yield name, Deviations(counts={total: counts}, sizes=limits)

    # ---- layouts

    def _names(self) -> list[str]:
        return list(self._declaration.tensors)

    def _tensors_to_vary(self, names: Iterable[str]) -> list[str]:
        """Return the tensors that are varied alone; of a list, the first two."""
        return [name for name in names if self._declaration.tensors_of_lists.get(name, 0) < 2]

    def _layouts(self) -> Iterator[tuple[str, Deviations]]:
        names = self._names()
        for layout in LAYOUTS:
            if layout != "contiguous":
                yield f"all_{layout}", Deviations(layouts=dict.fromkeys([*names, "grad_output"], layout))
        for name in self._tensors_to_vary(names) if len(names) > 1 else ():
            for layout in ("misaligned", "transposed"):
                if layout == "misaligned" or len(self._declaration.shapes(self._plan(Deviations())).get(name, ())) > 1:
                    yield f"{name}_{layout}", Deviations(layouts={name: layout})
        if not self._declaration.differentiable:
            return
        for layout in ("misaligned", "transposed"):
            yield f"cotangent_{layout}", Deviations(layouts={"grad_output": layout})
        yield "cotangent_of_a_sum", Deviations(layouts={"grad_output": "expanded"})

    # ---- parameters and numbers

    def _parameters(self) -> Iterator[tuple[str, Deviations]]:
        for name, values in self._declaration.parameters.items():
            if values.tied is not None and len(self._declaration.choices(name, self._plan(Deviations()))) > 1:
                for share, spoken in ((0.0, "first"), (1.0, "last")):
                    yield f"{spoken}_{name}", Deviations(parameters={name: Place(share)})
            for value in values.choices:
                of_result = isinstance(value, torch.dtype) and value.is_floating_point  # the tested one
                if value != self._declaration.defaults[name] and not of_result:
                    yield f"{name}_{value}", Deviations(parameters={name: value})
        for name in self._declaration.optional:
            yield f"without_{name}", Deviations(parameters={name: None})
        if len(self._declaration.optional) > 1 and set(self._declaration.optional) < set(self._declaration.tensors):
            yield "without_any_that_may_be_left_out", Deviations(parameters=dict.fromkeys(self._declaration.optional))

    def _floating(self) -> dict[str, TensorInput]:
        return {
            name: tensor
            for name, tensor in self._declaration.tensors.items()
            if tensor.is_floating and tensor.make is None
        }

    def _numbers(self) -> Iterator[tuple[str, Deviations]]:
        floating = self._floating()
        for kind, spoken in KINDS_OF_ALL.items():
            kinds = {name: kind for name, tensor in floating.items() if kind in tensor.kinds and not has_range(tensor)}
            if kinds:
                yield spoken, Deviations(kinds=kinds)
        if zero := {name: ZERO for name, tensor in floating.items() if not has_range(tensor)}:
            yield "zeros", Deviations(kinds=zero)
        if ends := {name: ENDS[kind] for name, tensor in floating.items() for kind in tensor.kinds if kind in ENDS}:
            changes = Deviations(kinds=ends)
            # A definition may be meant for the open range alone: the logarithm of 0 times 0 is NaN.
            if self._declaration.is_finite(self.case(changes, DTYPES["float64"], np.random.default_rng(0), {})):
                yield "ends", changes
        for name in self._tensors_to_vary(floating):
            tensor = floating[name]
            if tensor.special:
                axes = tensor.axes[:1] if tensor.axes[:1] == (LEADING,) else [*notation.names(tensor.axes[:1])]
                first = {axis: self._allowed[axis].nearest(16) for axis in axes}
                yield f"special_values_in_{name}", Deviations(special=name, sizes=first)

    def _integers(self) -> Iterator[tuple[str, Deviations]]:
        for name in self._tensors_to_vary(self._declaration.tensors):
            tensor = self._declaration.tensors[name]
            if tensor.is_floating or tensor.make is not None or isinstance(tensor, Ragged):
                continue
            if tensor.dtypes == ("bool",):
                yield f"{name}_all_false", Deviations(kinds={name: "least"})
                yield f"{name}_all_true", Deviations(kinds={name: "largest"})
            else:
                for pattern in ("least", "largest", "ends", "ascending"):
                    yield f"{name}_{pattern}", Deviations(kinds={name: pattern})
            if tensor.also:
                yield f"{name}_all_{tensor.also[0]}", Deviations(kinds={name: "others"})

    # ---- from a request to a case

    def _plan(self, deviations: Deviations) -> CallPlan:
        declaration = self._declaration
        sizes = {**self._base, **deviations.sizes}
        leading = deviations.leading
        if leading is None:
            leading = (sizes[LEADING],) if LEADING in sizes else ()
        counts = {total: np.array(shares, np.int64) for total, shares in deviations.counts.items()}
        return declaration.plan(sizes, leading, {**declaration.defaults, **deviations.parameters}, counts)

    def _elements(self, deviations: Deviations) -> int:
        return sum(
            int(np.prod(shape, dtype=np.int64)) for shape in self._declaration.shapes(self._plan(deviations)).values()
        )

    def _maker(self, deviations: Deviations) -> Make:
        return lambda dtype: self.case(deviations, dtype, np.random.default_rng(11), {})

    def case(
        self, changes: Deviations, dtype: DType, rng: np.random.Generator, arrays: Mapping[str, np.ndarray]
    ) -> Case:
        """Return a named case.

        Args:
            changes: its deviations from the ordinary one.
            dtype: the tested dtype.
            rng: the source of its numbers.
            arrays: the numbers of some inputs, and of "grad_output".
        """
        declaration, plan = self._declaration, self._plan(changes)
        normal = {name: "normal" for name, tensor in self._floating().items() if not has_range(tensor)}
        inputs = declaration.make_inputs(plan, rng, dtype, {**normal, **changes.kinds})
        for name in inputs.keys() & arrays.keys():
            given, dtypes = arrays[name], declaration.tensors[name].dtypes
            inputs[name] = given.astype(given.dtype if given.dtype.name in dtypes else inputs[name].dtype)
        if changes.special in inputs:
            array = inputs[changes.special]
            inputs[changes.special] = _insert_special_values(array, dtype_of(array.dtype), plan.parameters)
        case = declaration.case(plan, inputs, rng, dtype, _present_layouts(changes.layouts, inputs))
        if "grad_output" in arrays:
            cotangent = np.broadcast_to(arrays["grad_output"], case.grad_output.shape)
            case = replace(case, grad_output=cotangent.astype(case.grad_output.dtype))
        return case


@dataclass(frozen=True)
class Example:
    """A named case before its declaration is known: see `example`."""

    leading: Shape | None
    arguments: Mapping[str, Any]

    def of(self, declaration: Declaration) -> Make:
        """Return the function that makes the case.

        Raises:
            ValueError: the operation has no argument or axis of a given name.
        """
        known = {*declaration.tensors, *declaration.parameters, *declaration.axes, "grad_output"}
        if unknown := sorted(self.arguments.keys() - known):
            raise ValueError(f"example: {declaration.name} has no argument and no axis {unknown[0]!r}")
        return lambda dtype: self._case(declaration, dtype)

    def _case(self, declaration: Declaration, dtype: DType) -> Case:
        rng = np.random.default_rng(17)
        numbers, kinds, layouts = dict[str, np.ndarray](), dict[str, str](), dict[str, str]()
        parameters = {name: value for name, value in self.arguments.items() if name in declaration.parameters}
        for name in (*declaration.tensors, "grad_output"):
            value = self.arguments.get(name, ())
            for entry in value if isinstance(value, tuple) else (value,):
                if entry is None:
                    parameters[name] = None
                elif isinstance(entry, str):
                    (layouts if entry in LAYOUTS else kinds)[name] = entry
                else:
                    numbers[name] = np.asarray(entry(rng, dtype) if callable(entry) else entry)
        shapes = {name: array.shape for name, array in numbers.items() if name in declaration.tensors}
        sizes, misfit = notation.sizes({name: declaration.tensors[name].axes for name in shapes}, shapes)
        if misfit:
            raise ValueError(
                f"example: {misfit} of shape {list(shapes[misfit])} is not {declaration.tensors[misfit].axes}"
            )
        leading = sizes.pop(LEADING, self.leading)
        sizes |= {axis: size for axis, size in self.arguments.items() if axis in declaration.axes}
        sizes |= {} if leading is None or LEADING not in declaration.axes else {LEADING: math.prod(leading)}
        counts = {
            tensor.total: (np.diff(numbers[name]) if tensor.are_offsets else numbers[name]).tolist()
            for name, tensor in declaration.tensors.items()
            if isinstance(tensor, Ragged) and name in numbers
        }
        changes = Deviations(
            sizes=sizes, leading=leading, counts=counts, parameters=parameters, kinds=kinds, layouts=layouts
        )
        return NamedCases(declaration).case(changes, dtype, rng, numbers)


def example(*leading: int, **arguments: Any) -> Example:
    """Describe a named case by its deviations from the ordinary one, for `examples` of `fourfold.operation`.

    Args:
        leading: the sizes of the axes that ``...`` stands for.
        arguments: by the name of an axis, its size; of a parameter, its value; of a tensor or "grad_output", a layout,
            a kind of numbers, the numbers, or a function of a generator and the dtype that returns them; or a pair of
            numbers and layout. A tensor that is None is left out.
    """
    return Example(leading or None, arguments)


def _present_layouts(layouts: Mapping[str, str], inputs: Mapping[str, Any]) -> dict[str, str]:
    return {name: layout for name, layout in layouts.items() if name in inputs or name == "grad_output"}


def _axis_label(axis: str) -> str:
    return "rows" if axis == LEADING else axis


def _insert_special_values(array: np.ndarray, dtype: DType, parameters: Mapping[str, Any]) -> np.ndarray:
    """Return an array with one special value in each slice along the first axis, in turn, at varying places.

    A vector gets all special values, evenly spaced.
    """
    special = list(special_values(dtype, parameters).values())
    copy = array.copy()
    slices = copy.reshape(len(copy), -1) if array.ndim > 1 and array.size else copy.reshape(1, -1)
    if array.ndim > 1:
        for place, row in enumerate(slices):
            if row.size:
                row[place * 7 % row.size] = special[place % len(special)]
    elif array.size:
        for place, value in enumerate(special):
            slices[0, place * array.size // len(special) % array.size] = value
    return slices.reshape(array.shape)


def sized_cases(declaration: Declaration) -> Sized:
    """Return a declaration's cases of chosen sizes."""
    cases = NamedCases(declaration)
    integers = {
        name: (tensor.low, tensor.high - 1)
        for name, tensor in declaration.tensors.items()
        if isinstance(tensor.high, int) and tensor.make is None
    }
    return Sized(cases.axes, cases.of_sizes, cases.allows, cases.largest, cases.varied, integers, cases.filling)


def examples(declaration: Declaration) -> dict[str, Make]:
    """Return the named cases that follow from a declaration."""
    return NamedCases(declaration).examples()


def join_cases(declaration: Declaration, makers: Mapping[str, Make]) -> dict[str, Make]:
    """Return the ordinary case, then given named cases, then the others that follow from a declaration.

    The author of a given case made it small and knows what goes wrong there, so it shows a failure best.
    """
    first, *others = examples(declaration).items()
    return dict([first, *makers.items(), *(pair for pair in others if pair[0] not in makers)])
