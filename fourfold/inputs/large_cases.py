"""Large cases, sized by the constants of an implementation's source, and a few that every implementation gets.

A generated case has at most 2048 elements, and a named case is long along one axis only. Large cases pass the counts at
which types of 8 and of 16 bits wrap, are long along two axes at once, and lie at, next to and between the multiples of
each constant. Each case is priced before it is made, and the cases that fit into a budget run.
"""

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fourfold.inputs.constants import NONE, Constant, Constants
from fourfold.numerics.dtypes import DType, dtype_of
from fourfold.operations import axes as notation
from fourfold.operations.axes import LEADING
from fourfold.operations.case import Case, is_floating
from fourfold.operations.claims import Claims
from fourfold.operations.record import Operation

# The sizes of two long axes, not multiples of a block. The second pair replaces the first if that costs more than
# `BOTH_AT_MOST`.
BOTH, BOTH_AT_MOST = ((257, 300), (131, 150)), 150_000
# The sizes of one long axis: past a count of 11 bits, and past one of 16.
MANY, MOST = 2051, 65_537
# The most places in a case, counted as the product of the sizes of its axes. `CONTRACTED` is the limit if its results
# have few elements, such as those of a matrix product, because its places are then cheaper.
PLACES, CONTRACTED = 200_000, 4_000_000
# The approximate price of a call, and of a row with its own program, in elements that the interpreter computes.
CALL, ROW = 4_000, 100
# The budgets of a check with 25 generated cases, for the cases that every implementation gets, and for the cases of
# constants. Each pair holds the budget in one dtype, and in each of the others: sizes hardly depend on the dtype. The
# budgets grow with the number of generated cases.
GENERATED = 25
EVERY, ASKED = (500_000, 150_000), (1_400_000, 200_000)
# The budget of the cases past the comparisons that the code makes at run time.
PAST = 500_000
# The price limit of the one case that forward takes past its budget, in one dtype: past the largest constant, along an
# axis with a program for each place.
DEAR_LIMIT = 7_000_000
# The sizes of the axes of the case that holds the compared values.
MODEST = (9, 17, 5, 4)


# The sizes of a case, and the values of both sides of each comparison by its number.
Observed = tuple[Mapping[str, int], Mapping[int, tuple[float, float]]]


def equal_at(observed: Sequence[Observed]) -> Iterator[tuple[int, str, int]]:
    """Yield where the two sides of a comparison meet: its number, an axis, and the axis's size there or just before.

    The difference of the two sides is taken to be linear along one axis, the others as in the first case: products of
    sizes are.

    Args:
        observed: a case, followed by cases that are each larger along one axis.
    """
    first, first_sides = observed[0]
    for sizes, sides in observed[1:]:
        (axis,) = (axis for axis in sizes if sizes[axis] != first[axis])
        for number in first_sides.keys() & sides.keys():
            (left, right), (left_then, right_then) = first_sides[number], sides[number]
            slope = ((left_then - right_then) - (left - right)) / (sizes[axis] - first[axis])
            if slope:
                size = first[axis] - (left - right) / slope
                if sizes[axis] < size <= PLACES:
                    yield number, axis, math.floor(size)


@dataclass(frozen=True)
class SizedCase:
    """A case that is not made yet: its sizes, its price, and the constant that it comes from, if any."""

    sizes: Mapping[str, int]
    name: str
    price: float
    constant: Constant | None = None


@dataclass(frozen=True, eq=False)
class LargeCases:
    """The large cases of an operation for one implementation and dtype.

    Attributes:
        operation: the operation's record. Only a `sized` one has cases of chosen sizes.
        claims: the implementation's claims.
        dtype: the dtype of the cases.
        constants: the constants of the implementation's source.
        share: the share of the budget for cases of constants.
        dear_limit: the price limit of the one case that forward takes past its budget.
        every_nth: the first dtype takes every n-th of the combined cases (see `fourfold.inputs.combinations`), and none
            for 0.
    """

    operation: Operation
    claims: Claims
    dtype: DType
    constants: Constants = field(default=NONE)
    share: float = 1.0
    dear_limit: float = DEAR_LIMIT
    every_nth: int = 1

    def cases(self, examples: int, dear: bool) -> Iterator[tuple[str, Case]]:
        """Yield the cases of a check with `examples` generated cases, by name. `dear` adds one past the budget."""
        sized = self.operation.sized
        if sized is None:
            return
        for case_sizes in self.choose(examples, dear):
            case = sized.make(case_sizes.sizes)(self.dtype)
            if self.claims.outside(self.operation, case, self.dtype) is None:
                yield case_sizes.name, case
        if self.constants.values or (self.constants.sizes and sized.integers):
            case = self._values_case()
            if self.claims.outside(self.operation, case, self.dtype) is None:
                yield "numbers_of_the_source", case

    def constants_line(self, examples: int) -> str:
        """Return the constants that sizes come from, in one line, or "" if there are none."""
        by_file: dict[str, list[str]] = {}
        if self.operation.sized is None:
            return ""
        constants = {c.constant for c in self.choose(examples, True) if c.constant}
        for constant in sorted(constants):
            by_file.setdefault(constant.file, []).append(f"{constant.value} (line {constant.line})")
        texts = (f"{file}: {', '.join(sizes)}" for file, sizes in by_file.items())
        return f"sizes from constants of {'; '.join(texts)}" if by_file else ""

    def choose(self, examples: int, dear: bool) -> list[SizedCase]:
        """Return the cases that fit into a check's budget, in ascending order of price."""
        place = 0 if self.is_first else 1
        times = max(examples, GENERATED) / GENERATED
        standard = _affordable(self._every(), EVERY[place] * times)
        ranked = sorted(self._ranked_cases(), key=lambda candidate: candidate[:2])
        affordable = _affordable((candidate for *_, candidate in ranked), ASKED[place] * times * self.share)
        if dear and place == 0:
            past = [c for rank, price, c in ranked if rank == 0 and price <= self.dear_limit and c not in affordable]
            affordable += sorted(past, key=lambda c: (max(c.sizes.values()), c.price))[-1:]
        by_name: dict[str, SizedCase] = {}
        for candidate in (*standard, *affordable):
            by_name.setdefault(candidate.name, candidate)
        return sorted(by_name.values(), key=lambda candidate: candidate.price)

    def _every(self) -> Iterator[SizedCase]:
        axes = list(self._axes)
        for pair in itertools.combinations(axes, 2):
            candidates = [c for sizes in BOTH for c in self._resize(dict(zip(pair, sizes)))]
            yield from [c for c in candidates if c.price <= BOTH_AT_MOST][:1]
        for size in (MANY, MOST):
            for axis in axes:
                yield from self._resize({axis: size})

    def _ranked_cases(self) -> Iterator[tuple[int, float, SizedCase]]:
        """Yield the cases of constants as rank, price and case: past a constant first, then at it, then below it."""
        for constant in self.constants.sizes:
            c = int(constant.value)
            for rank, size in enumerate((c + 1, c, c - 1, 2 * c + 1, 3 * c - 1, 3 * c)):
                for axis in self._axes:
                    for candidate in self._resize({axis: size}, constant):
                        yield rank, candidate.price, candidate
            for pair in itertools.combinations(self._axes, 2):
                for candidate in self._resize(dict(zip(pair, (c + 1, c + 2))), constant):
                    if candidate.price <= BOTH_AT_MOST:
                        yield 1, candidate.price, candidate
            # A kernel with a tile along each axis has a whole tile in the middle only if all axes are long.
            if len(self._axes) > 2:
                for candidate in self._resize({axis: c + 1 + place for place, axis in enumerate(self._axes)}, constant):
                    if candidate.price <= BOTH_AT_MOST:
                        yield 0, candidate.price, candidate
        for first, second in itertools.permutations(self.constants.sizes, 2):
            for pair in itertools.combinations(self._axes, 2):
                for candidate in self._resize(
                    dict(zip(pair, (int(first.value) + 1, int(second.value) + 1))), max(first, second)
                ):
                    if candidate.price <= BOTH_AT_MOST:
                        yield 2, candidate.price, candidate

    def probes(self) -> Iterator[tuple[Mapping[str, int], Case]]:
        """Yield small cases for `past` with their sizes: one, and one that is larger along each axis that allows it."""
        sized = self.operation.sized
        if sized is None or not self.is_first or not self.constants.comparisons:
            return
        for sizes in (dict(sized.axes), *({**sized.axes, axis: 4 * size + 1} for axis, size in sized.axes.items())):
            if self.allows(sizes):
                yield sizes, sized.make(sizes)(self.dtype)

    def cases_past(self, observed: Sequence[Observed]) -> Iterator[tuple[str, Case]]:
        """Yield cases just past a comparison, and where its sides are equal, from the observed values of `probes`."""
        sized = self.operation.sized
        assert sized is not None
        usual = {c.name for c in self.choose(GENERATED, True)}
        candidates = []
        for number, axis, size in equal_at(observed):
            comparison = self.constants.comparisons[number]
            constant = Constant(size, os.path.basename(comparison.file), comparison.line)
            candidates += [c for offset in (1, 0) for c in self._resize({axis: size + offset}, constant)]
        for candidate in _affordable(sorted(candidates, key=lambda c: c.price), PAST * self.share):
            if candidate.name not in usual:
                case = sized.make(candidate.sizes)(self.dtype)
                if self.claims.outside(self.operation, case, self.dtype) is None:
                    assert candidate.constant is not None
                    yield f"{candidate.name}_of_line_{candidate.constant.line}_of_{candidate.constant.file}", case

    def allows(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the operation and the claims allow these sizes, and a case of them is affordable."""
        sized = self.operation.sized
        if sized is None or not all(_is_claimed(self.claims, axis, size) for axis, size in sizes.items()):
            return False
        return np.prod([*sizes.values()], dtype=float) <= PLACES and sized.allows(sizes)

    def price(self, sizes: Mapping[str, int]) -> float:
        """Return the approximate price of a case of these sizes, in elements that the interpreter computes."""
        sized = self.operation.sized
        assert sized is not None
        return self._price(sizes, sized.largest(sizes))

    @property
    def is_first(self) -> bool:
        """Whether this dtype takes the most large cases: float32, or else the first claimed dtype."""
        dtypes = list(self.claims.dtypes) or ["float32"]
        return self.dtype.name == ("float32" if "float32" in dtypes else dtypes[0])

    @property
    def _axes(self) -> Mapping[str, int]:
        assert self.operation.sized is not None
        return self.operation.sized.axes

    def _resize(self, long: Mapping[str, int], constant: Constant | None = None) -> Iterator[SizedCase]:
        """Yield the case with these sizes of some axes, if the operation accepts them and the case is not too large.

        Past a constant above `MOST` the other axes are 1 if the case would be too large with their usual sizes.
        """
        sized = self.operation.sized
        assert sized is not None
        sizes = {**sized.axes, **long}
        if constant is not None and constant.value > MOST and np.prod([*sizes.values()], dtype=float) > PLACES:
            short = {**dict.fromkeys(sized.axes, 1), **long}
            sizes = short if sized.allows(short) else sizes
        within = {axis: size for axis, size in long.items() if _is_claimed(self.claims, axis, size)}
        places = np.prod([*sizes.values()], dtype=float)
        if len(within) < len(long) or places > CONTRACTED or not sized.allows(sizes):
            return
        price = self._price(sizes, sized.largest(sizes))
        if places > PLACES and price > BOTH_AT_MOST:
            return
        name = "_".join(f"{'rows' if axis == LEADING else axis}_{size}" for axis, size in long.items())
        yield SizedCase(sizes, name, price, constant)

    def _price(self, sizes: Mapping[str, int], largest: float) -> float:
        elements, rows = largest, 0.0
        for text in self.operation.axes.values():
            axes = notation.parse(text)
            if sizes.keys() >= {*notation.names(axes), *({LEADING} & {*axes})}:
                shape = notation.shape(axes, sizes, (sizes[LEADING],) if LEADING in axes else ())
                elements = max(elements, float(np.prod(shape, dtype=float)))
                lengths = [size for axis, size in zip(axes, shape) if axis == LEADING or notation.names((axis,))]
                rows = max(rows, float(np.prod(lengths[:-1], dtype=float)))
        return CALL + elements + ROW * rows

    def _values_case(self) -> Case:
        """Return a case of numbers at, next to, past and below the values that the source compares with.

        Integers of a fixed range are at and next to all constants of the source that lie in it.
        """
        sized = self.operation.sized
        assert sized is not None
        sizes = {axis: MODEST[place % len(MODEST)] for place, axis in enumerate(sized.axes)}
        case = sized.make(sizes if sized.allows(sizes) else sized.axes)(self.dtype)
        rng, inputs = np.random.default_rng(23), {}
        for name, array in case.inputs.items():
            if is_floating(array) and name not in self.operation.ordinary:
                numbers, limit = self._around_values(array.dtype), array.size // 2
            elif name in sized.integers:
                numbers, limit = self._around_constants(*sized.integers[name]), array.size
            else:
                continue
            inputs[name] = array.copy()
            places = rng.permutation(array.size)[: min(len(numbers), limit)]
            inputs[name].flat[places] = rng.permutation(numbers)[: len(places)]
        return case.with_inputs(**inputs)

    def _around_constants(self, smallest: int, largest: int) -> np.ndarray:
        """Return the constants of the source, as sizes or in comparisons, and their neighbours, within a range."""
        integers = [int(c.value) for c in (*self.constants.sizes, *self.constants.values) if c.value == int(c.value)]
        near = np.unique([c + offset for c in integers for offset in (-1, 0, 1)])
        return near[(smallest <= near) & (near <= largest)]

    def _around_values(self, dtype: np.dtype) -> np.ndarray:
        """Return the values that the source compares with, their neighbours in a dtype, and numbers around them."""
        values, largest = np.array([constant.value for constant in self.constants.values]), dtype_of(dtype).largest
        with np.errstate(over="ignore"):
            x = np.concatenate([values, -values]).astype(dtype)
            # A type without infinities has NaN in their place, so its largest number has no neighbour on that side.
            ends = [np.nextafter(x, np.array(end, dtype)) for end in (largest, -largest)]
            return np.concatenate([x, *ends, *[(x.astype(np.float64) * by).astype(dtype) for by in (0.75, 1.25)]])


def _is_claimed(claims: Claims, axis: str, size: int) -> bool:
    limit = claims.sizes.get(notation.indexed_axis(axis))
    return limit is None or (limit[0] <= size <= limit[1] if isinstance(limit, tuple) else size % limit == 0)


def _affordable(ordered: Iterable[SizedCase], budget: float) -> list[SizedCase]:
    """Return the cases that fit into a budget, taken in order, each once."""
    affordable: dict[str, SizedCase] = {}
    for candidate in ordered:
        if candidate.name not in affordable and candidate.price <= budget:
            affordable[candidate.name] = candidate
            budget -= candidate.price
    return list(affordable.values())
