"""Named cases that follow from a declaration: sizes around blocks, layouts, ranks, parameters, special values."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fourfold.declaration.cases import CallPlan, Declaration, has_range
from fourfold.inputs.arrays import ENDS, ZERO
from fourfold.inputs.special_values import special_values
from fourfold.numerics.dtypes import DTYPES, DType
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
# The sizes of axes that are last in some tensor, and of the others, in turn. No two of them are equal.
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
class Wanted:
    """The deviations of a named case from the ordinary one."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    leading: Shape | None = None
    counts: Mapping[str, list[int]] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    how: Mapping[str, str] = field(default_factory=dict)
    special: str | None = None  # the input that has special values


class NamedCases:
    """The named cases of a declaration."""

    def __init__(self, declaration: Declaration) -> None:
        self._of = of = declaration
        # By the long axes and the sizes of the others: the elements of the largest intermediate result where the long
        # axes have the given sizes, and the power by which it grows with them.
        self._growth: dict[tuple[Any, ...], tuple[int, float, dict[str, int]]] = {}
        last = dict.fromkeys(notation.last(tensor.axes for tensor in of.tensors.values()))
        for total, ragged in of.ragged.items():  # more rows than samples
            last |= {total: None}
            last.pop(ragged.samples, None)
        self._base: dict[str, int] = {}
        for axis in of.axes:
            choices = LAST if axis in last and axis != LEADING else OTHERS
            last_axes = sum(other in last and other != LEADING for other in self._base)
            place = last_axes if choices is LAST else len(self._base) - last_axes
            self._base[axis] = of.allowed[axis].nearest(choices[place % len(choices)])
        # The axes whose sizes may be chosen, and their sizes in other cases.
        self.axes = {
            axis: allowed.nearest(SHORT[place % len(SHORT)])
            for place, (axis, allowed) in enumerate(of.allowed.items())
            if allowed.nearest(SHORT[0]) <= max(SHORT)
            and notation.item_axes([notation.indexed_axis(axis)], 0) == (axis,)
        }

    def examples(self) -> dict[str, Make]:
        """Return all named cases: the ordinary one first, then the others in ascending order of their elements."""
        wanted = {"ordinary": Wanted()}
        for cases in (
            self._empty(),
            self._lists(),
            self._sizes(),
            self._ranks(),
            self._ragged_cases(),
            self._layouts(),
        ):
            wanted |= {name: what for name, what in cases if name not in wanted}
        for cases in (self._parameters(), self._numbers(), self._integers()):
            wanted |= {name: what for name, what in cases if name not in wanted}
        count = {name: self._elements(what) for name, what in wanted.items()}
        order = sorted(wanted, key=lambda name: (name != "ordinary", count[name]))
        return {name: self._maker(wanted[name]) for name in order}

    def of_sizes(self, sizes: Mapping[str, int]) -> Make:
        """Return a named case of chosen sizes. The other axes have the base sizes of all named cases."""
        return self._maker(Wanted(sizes=sizes))

    def varied(self, sizes: Mapping[str, int], leading: Shape | None, parameters: Mapping[str, Any]) -> Make:
        """Return a named case of chosen sizes, leading axes and parameters."""
        return self._maker(Wanted(sizes=sizes, leading=leading, parameters=parameters))

    def allows(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the declaration allows the sizes, and the case's largest intermediate result is affordable."""
        allowed = all(size and self._of.allowed[axis].nearest(size) == size for axis, size in sizes.items())
        return allowed and self.largest(sizes) <= AFFORDABLE

    def filling(self, elements: int, odd: bool = False) -> dict[str, int]:
        """Return equal sizes, as far as the declaration allows, whose product is about `elements`.

        The product of all axes is also what a contraction computes. A call with a larger intermediate result than that
        has shorter axes.
        """
        most = {axis: self._of.allowed[axis].nearest(elements) for axis in self.axes}
        while True:
            sizes: dict[str, int] = {}
            for axis in sorted(most, key=lambda axis: most[axis]):  # a short axis leaves more to the others
                side = (elements / math.prod(sizes.values())) ** (1 / (len(most) - len(sizes)))
                even = self._of.allowed[axis].nearest(1 << max(round(math.log2(side)), 1))
                sizes[axis] = self._of.allowed[axis].nearest(even - odd)
            if elements < 2 or self.largest(sizes) <= 4 * elements:
                return sizes
            elements //= 4

    def largest(self, sizes: Mapping[str, int]) -> float:
        """Estimate the number of elements of the largest intermediate result from calls with shorter long axes."""
        few, more = 32, 64
        long = tuple(axis for axis, size in sizes.items() if size > more)
        short = {axis: size for axis, size in sizes.items() if axis not in long}
        key = (*long, *sorted(short.items()))
        if key not in self._growth:
            lengths = [{axis: self._of.allowed[axis].nearest(most) for axis in long} for most in (few, more)]
            below, at = (max(self._run(Wanted(sizes={**short, **longer})), 1) for longer in lengths)
            steps = [np.log(lengths[1][axis] / max(lengths[0][axis], 1)) for axis in long]
            power = np.log(at / below) / np.mean(steps) if any(steps) else 0.0
            self._growth[key] = at, max(power, 0.0), lengths[1]
        at, power, longer = self._growth[key]
        scale = np.exp(np.mean([np.log(sizes[axis] / max(longer[axis], 1)) for axis in long])) if long else 1.0
        return float(at * scale**power)

    # ---- sizes

    def _lists(self) -> Iterator[tuple[str, Wanted]]:
        for count in dict.fromkeys((*self._of.counts[:3], self._of.counts[-1])) if self._of.lists else ():
            yield f"lists_of_{count}", Wanted(parameters=self._of.list_arguments(count))

    def _axes(self) -> list[str]:
        """Return the axes; of the axes of a list's tensors, only those of the first two tensors."""
        return [axis for axis in self._of.axes if axis == notation.indexed_axis(axis) or axis.endswith(("[0]", "[1]"))]

    def _empty(self) -> Iterator[tuple[str, Wanted]]:
        axes = [axis for axis in self._axes() if self._of.allowed[axis].nearest(0) == 0]
        if axes:
            every = [axis for axis in self._of.axes if self._of.allowed[axis].nearest(0) == 0]
            yield "no_elements", Wanted(sizes=dict.fromkeys(every, 0))
        for axis in axes:
            if self._plan(Wanted(sizes={axis: 0})).sizes[axis] == 0:
                yield f"no_{_axis_label(axis)}", Wanted(sizes={axis: 0})

    def _sizes(self) -> Iterator[tuple[str, Wanted]]:
        ones = {axis: self._of.allowed[axis].nearest(1) for axis in self._of.axes}
        yield "one_element", Wanted(sizes=ones, leading=() if ones.get(LEADING) == 1 else None)
        for axis in self._axes():
            one = self._of.allowed[axis].nearest(1)
            yield f"{_axis_label(axis)}_{one}", Wanted(sizes={axis: one})
            shorts = [other for other in self._of.axes if other != axis]
            short = {o: self._of.allowed[o].nearest(SHORT[i % len(SHORT)]) for i, o in enumerate(shorts)}
            for size in (*AROUND_BLOCKS, LONG):
                nearest = self._of.allowed[axis].nearest(size)
                if self.largest({**short, axis: nearest}) <= AFFORDABLE:
                    yield f"{_axis_label(axis)}_{nearest}", Wanted(sizes={**short, axis: nearest})

    def _run(self, deviations: Wanted) -> int:
        plan = self._plan(deviations)
        inputs = self._of.make_inputs(plan, np.random.default_rng(0), DTYPES["float32"], {})
        return self._of.infer_shape(inputs, plan.parameters).largest

    def _ranks(self) -> Iterator[tuple[str, Wanted]]:
        if LEADING not in self._of.axes:
            return
        allowed = self._of.allowed[LEADING]
        turns = ("transposed", "axes_reversed")
        names = [*self._names(), "grad_output"]
        in_turn = {name: turns[place % 2] for place, name in enumerate(names)}
        ranks = {
            "without_leading_axes": Wanted(leading=()),
            "two_leading_axes": Wanted(leading=(3, 4)),
            "three_leading_axes": Wanted(leading=(2, 3, 4)),
            "two_leading_axes_each_in_another_order": Wanted(leading=(3, 4), layouts=in_turn),
            "three_leading_axes_each_in_another_order": Wanted(leading=(3, 2, 5), layouts=in_turn),
        }
        for name, axes in ranks.items():
            rows = int(np.prod(axes.leading or (), dtype=np.int64))
            if allowed.nearest(rows) == rows:
                yield name, axes
        last = {axis: self._of.allowed[axis].nearest(3) for axis in self._of.axes if axis != LEADING}
        short = {**last, LEADING: allowed.nearest(700)}
        if self.largest(short) <= AFFORDABLE:
            yield "many_short_rows", Wanted(sizes=short)

    def _ragged_cases(self) -> Iterator[tuple[str, Wanted]]:
        batches = {
            "no_samples": [],
            "samples_all_empty": [0, 0, 0],
            "empty_samples_at_both_ends": [0, 0, 3, 0, 2, 0],
            "samples_of_one_row": [1] * 70,
            "one_full_sample_among_empty": [0] * 20 + [129] + [0] * 20,
            "samples_alike": [7] * 9,
            "one_sample": [257],
        }
        for total, of in self._of.ragged.items():
            for name, counts in batches.items():
                if self._of.allowed[of.samples].nearest(len(counts)) != len(counts):
                    continue
                if self._of.allowed[total].nearest(sum(counts)) == sum(counts):
                    most = {of.most: max(counts, default=1) + 1} if of.most else {}
                    yield name, Wanted(counts={total: counts}, sizes=most)

    # ---- layouts

    def _names(self) -> list[str]:
        return list(self._of.tensors)

    def _tensors_to_vary(self, names: Iterable[str]) -> list[str]:
        """Return the tensors that are varied alone; of a list, the first two."""
        return [name for name in names if self._of.tensors_of_lists.get(name, 0) < 2]

    def _layouts(self) -> Iterator[tuple[str, Wanted]]:
        names = self._names()
        for layout in LAYOUTS:
            if layout != "contiguous":
                yield f"all_{layout}", Wanted(layouts=dict.fromkeys([*names, "grad_output"], layout))
        for name in self._tensors_to_vary(names) if len(names) > 1 else ():
            for layout in ("misaligned", "transposed"):
                if layout == "misaligned" or len(self._of.shapes(self._plan(Wanted())).get(name, ())) > 1:
                    yield f"{name}_{layout}", Wanted(layouts={name: layout})
        for layout in ("misaligned", "transposed"):
            yield f"cotangent_{layout}", Wanted(layouts={"grad_output": layout})
        yield "cotangent_of_a_sum", Wanted(layouts={"grad_output": "expanded"})

    # ---- parameters and numbers

    def _parameters(self) -> Iterator[tuple[str, Wanted]]:
        for name, values in self._of.parameters.items():
            if values.tied is not None and len(self._of.choices(name, self._plan(Wanted()))) > 1:
                for share, spoken in ((0.0, "first"), (1.0, "last")):
                    yield f"{spoken}_{name}", Wanted(parameters={name: Place(share)})
            for value in values.choices:
                if value != self._of.defaults[name]:
                    yield f"{name}_{value}", Wanted(parameters={name: value})
        for name in self._of.optional:
            yield f"without_{name}", Wanted(parameters={name: None})
        if len(self._of.optional) > 1 and set(self._of.optional) < set(self._of.tensors):
            yield "without_any_that_may_be_left_out", Wanted(parameters=dict.fromkeys(self._of.optional))

    def _floating(self) -> dict[str, TensorInput]:
        return {name: of for name, of in self._of.tensors.items() if of.is_floating and of.make is None}

    def _numbers(self) -> Iterator[tuple[str, Wanted]]:
        floating = self._floating()
        for kind, spoken in KINDS_OF_ALL.items():
            how = {name: kind for name, of in floating.items() if kind in of.kinds and not has_range(of)}
            if how:
                yield spoken, Wanted(how=how)
        if zero := {name: ZERO for name, of in floating.items() if not has_range(of)}:
            yield "zeros", Wanted(how=zero)
        if ends := {name: ENDS[kind] for name, of in floating.items() for kind in of.kinds if kind in ENDS}:
            wanted = Wanted(how=ends)
            # A definition may be meant for the open range alone: the logarithm of 0 times 0 is NaN.
            if self._of.is_finite(self.case(wanted, DTYPES["float64"], np.random.default_rng(0), {})):
                yield "ends", wanted
        for name in self._tensors_to_vary(floating):
            of = floating[name]
            if of.special:
                named = of.axes[:1] if of.axes[:1] == (LEADING,) else [*notation.names(of.axes[:1])]
                first = {axis: self._of.allowed[axis].nearest(16) for axis in named}
                yield f"special_values_in_{name}", Wanted(special=name, sizes=first)

    def _integers(self) -> Iterator[tuple[str, Wanted]]:
        for name in self._tensors_to_vary(self._of.tensors):
            of = self._of.tensors[name]
            if of.is_floating or of.make is not None or isinstance(of, Ragged):
                continue
            if of.dtypes == ("bool",):
                yield f"{name}_all_false", Wanted(how={name: "least"})
                yield f"{name}_all_true", Wanted(how={name: "largest"})
            else:
                for how in ("least", "largest", "ends", "ascending"):
                    yield f"{name}_{how}", Wanted(how={name: how})
            if of.also:
                yield f"{name}_all_{of.also[0]}", Wanted(how={name: "others"})

    # ---- from a request to a case

    def _plan(self, deviations: Wanted) -> CallPlan:
        of = self._of
        sizes = {**self._base, **deviations.sizes}
        leading = deviations.leading
        if leading is None:
            leading = (sizes[LEADING],) if LEADING in sizes else ()
        counts = {total: np.array(shares, np.int64) for total, shares in deviations.counts.items()}
        return of.plan(sizes, leading, {**of.defaults, **deviations.parameters}, counts)

    def _elements(self, deviations: Wanted) -> int:
        return sum(int(np.prod(shape, dtype=np.int64)) for shape in self._of.shapes(self._plan(deviations)).values())

    def _maker(self, deviations: Wanted) -> Make:
        return lambda dtype: self.case(deviations, dtype, np.random.default_rng(11), {})

    def case(self, wanted: Wanted, dtype: DType, rng: np.random.Generator, given: Mapping[str, np.ndarray]) -> Case:
        """Return a named case.

        Args:
            wanted: its deviations from the ordinary one.
            dtype: the tested dtype.
            rng: the source of its numbers.
            given: the numbers of some inputs, and of "grad_output".
        """
        of, plan = self._of, self._plan(wanted)
        normal = {name: "normal" for name, each in self._floating().items() if not has_range(each)}
        inputs = of.make_inputs(plan, rng, dtype, {**normal, **wanted.how})
        for name in inputs.keys() & given.keys():
            inputs[name] = given[name].astype(inputs[name].dtype)
        if wanted.special in inputs:
            special_dtype = of.tensors[wanted.special].dtype(dtype)
            inputs[wanted.special] = _insert_special_values(inputs[wanted.special], special_dtype, plan.parameters)
        case = of.case(plan, inputs, rng, dtype, _present_layouts(wanted.layouts, inputs))
        if "grad_output" in given:
            cotangent = np.broadcast_to(given["grad_output"], case.grad_output.shape)
            case = replace(case, grad_output=cotangent.astype(case.grad_output.dtype))
        return case


@dataclass(frozen=True)
class Example:
    """A named case before its declaration is known: see `example`."""

    leading: Shape | None
    given: Mapping[str, Any]

    def of(self, declaration: Declaration) -> Make:
        """Return the function that makes the case.

        Raises:
            ValueError: the operation has no argument or axis of a given name.
        """
        known = {*declaration.tensors, *declaration.parameters, *declaration.axes, "grad_output"}
        if unknown := sorted(self.given.keys() - known):
            raise ValueError(f"example: {declaration.name} has no argument and no axis {unknown[0]!r}")
        return lambda dtype: self._case(declaration, dtype)

    def _case(self, of: Declaration, dtype: DType) -> Case:
        rng = np.random.default_rng(17)
        numbers, how, layouts = dict[str, np.ndarray](), dict[str, str](), dict[str, str]()
        parameters = {name: value for name, value in self.given.items() if name in of.parameters}
        for name in (*of.tensors, "grad_output"):
            value = self.given.get(name, ())
            for each in value if isinstance(value, tuple) else (value,):
                if each is None:
                    parameters[name] = None
                elif isinstance(each, str):
                    (layouts if each in LAYOUTS else how)[name] = each
                else:
                    numbers[name] = np.asarray(each(rng, dtype) if callable(each) else each)
        shapes = {name: array.shape for name, array in numbers.items() if name in of.tensors}
        sizes, misfit = notation.sizes({name: of.tensors[name].axes for name in shapes}, shapes)
        if misfit:
            raise ValueError(f"example: {misfit} of shape {list(shapes[misfit])} is not {of.tensors[misfit].axes}")
        leading = sizes.pop(LEADING, self.leading)
        sizes |= {axis: size for axis, size in self.given.items() if axis in of.axes}
        sizes |= {} if leading is None or LEADING not in of.axes else {LEADING: math.prod(leading)}
        counts = {
            each.total: (np.diff(numbers[name]) if each.are_offsets else numbers[name]).tolist()
            for name, each in of.tensors.items()
            if isinstance(each, Ragged) and name in numbers
        }
        changes = Wanted(sizes=sizes, leading=leading, counts=counts, parameters=parameters, how=how, layouts=layouts)
        return NamedCases(of).case(changes, dtype, rng, numbers)


def example(*leading: int, **given: Any) -> Example:
    """Describe a named case by its deviations from the ordinary one, for `examples` of `fourfold.operation`.

    Args:
        leading: the sizes of the axes that ``...`` stands for.
        given: by the name of an axis, its size; of a parameter, its value; of a tensor or "grad_output", a layout, a
            kind of numbers, the numbers, or a function of a generator and the dtype that returns them; or a pair of
            numbers and layout. A tensor that is None is left out.
    """
    return Example(leading or None, given)


def _present_layouts(layouts: Mapping[str, str], inputs: Mapping[str, Any]) -> dict[str, str]:
    return {name: layout for name, layout in layouts.items() if name in inputs or name == "grad_output"}


def _axis_label(axis: str) -> str:
    return "rows" if axis == LEADING else axis


def _insert_special_values(array: np.ndarray, dtype: DType, parameters: Mapping[str, Any]) -> np.ndarray:
    """Return an array with one special value in each slice along the first axis, in turn, at varying places.

    A vector gets all special values, evenly spaced.
    """
    special = list(special_values(dtype, parameters).values())
    changed = array.copy()
    slices = changed.reshape(len(changed), -1) if array.ndim > 1 and array.size else changed.reshape(1, -1)
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
    named = NamedCases(declaration)
    integers = {
        name: (tensor.low, tensor.high - 1)
        for name, tensor in declaration.tensors.items()
        if isinstance(tensor.high, int) and tensor.make is None
    }
    return Sized(named.axes, named.of_sizes, named.allows, named.largest, named.varied, integers, named.filling)


def examples(declaration: Declaration) -> dict[str, Make]:
    """Return the named cases that follow from a declaration."""
    return NamedCases(declaration).examples()


def join_cases(declaration: Declaration, given: Mapping[str, Make]) -> dict[str, Make]:
    """Return the ordinary case, then given named cases, then the others that follow from a declaration.

    The author of a given case made it small and knows what goes wrong there, so it shows a failure best.
    """
    first, *others = examples(declaration).items()
    return dict([first, *given.items(), *(pair for pair in others if pair[0] not in given)])
