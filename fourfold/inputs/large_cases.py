"""Large cases, whose sizes come from the constants of an implementation's source, and a few that every one gets.

A case is generated with at most 2048 elements, and a named one is long along one axis. These cases pass the counts at
which types of 8 and of 16 bits wrap, are long along two axes at once, and lie at, next to and between the multiples of
each constant. Each is priced before it is made, and those that fit into a budget are run.
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

# Two axes at once, no multiples of a block; the shorter ones where the longer ones cost more than `BOTH_AT_MOST`.
BOTH, BOTH_AT_MOST = ((257, 300), (131, 150)), 150_000
# One axis past a count of 11 bits, and past one of 16.
MANY, MOST = 2051, 65_537
# The most places in a case: the product of the sizes of its axes. Where its results have few elements, as a product of
# matrices has, the places are cheaper.
PLACES, CONTRACTED = 200_000, 4_000_000
# What a case costs, about, in elements that the interpreter computes: a call, and a row that has a program of its own.
CALL, ROW = 4_000, 100
# The budgets of a check with 25 generated cases, for cases that every implementation gets and for those of constants:
# in one dtype, as sizes hardly depend on the dtype, and in each of the others. More generated cases have more.
GENERATED = 25
EVERY, ASKED = (500_000, 150_000), (1_400_000, 200_000)
# That of cases past what the code compares at run time.
PAST = 500_000
# Past its budget forward takes one case in one dtype: the largest constant along an axis of which each has a program.
DEAR = 7_000_000
# Sizes of the axes of the case that holds the values of comparisons.
MODEST = (9, 17, 5, 4)


# The sizes of a case, and by the number of a comparison what was on both of its sides.
Observed = tuple[Mapping[str, int], Mapping[int, tuple[float, float]]]


def equal_at(observed: Sequence[Observed]) -> Iterator[tuple[int, str, int]]:
    """Where the two sides of comparisons meet: the number of a comparison, an axis, and its size before or there.

    Along one axis, the others as in the first case, the difference of the sides is taken to be linear: so are products
    of sizes.

    Args:
        observed: a case, and others each of which is larger along one axis.
    """
    first, before = observed[0]
    for sizes, after in observed[1:]:
        (axis,) = (axis for axis in sizes if sizes[axis] != first[axis])
        for number in before.keys() & after.keys():
            (left, right), (left_then, right_then) = before[number], after[number]
            slope = ((left_then - right_then) - (left - right)) / (sizes[axis] - first[axis])
            if slope:
                size = first[axis] - (left - right) / slope
                if sizes[axis] < size <= PLACES:
                    yield number, axis, math.floor(size)


@dataclass(frozen=True)
class Chosen:
    """A case before it is made: its sizes, its price, and the constant that it comes from, if any."""

    sizes: Mapping[str, int]
    name: str
    price: float
    constant: Constant | None = None


@dataclass(frozen=True, eq=False)
class LargeCases:
    """The large cases of an operation for one implementation and dtype.

    Attributes:
        operation: its record; it has cases of chosen sizes only if it is `sized`.
        claims: what the implementation takes.
        dtype: of the cases.
        constants: of the implementation's source.
        share: of the budget for cases of constants.
        every: the first dtype takes each of the combined cases for 1 (see `fourfold.inputs.combinations`), each
            n-th for n, and none for 0.
    """

    operation: Operation
    claims: Claims
    dtype: DType
    constants: Constants = field(default=NONE)
    share: float = 1.0
    every: int = 1

    def cases(self, examples: int, dear: bool) -> Iterator[tuple[str, Case]]:
        """The cases that a check of so many generated cases takes, by name; `dear` ones past its budget too."""
        sized = self.operation.sized
        if sized is None:
            return
        for chosen in self.chosen(examples, dear):
            case = sized.make(chosen.sizes)(self.dtype)
            if self.claims.outside(self.operation, case, self.dtype) is None:
                yield chosen.name, case
        if self.constants.values:
            case = self._of_values()
            if self.claims.outside(self.operation, case, self.dtype) is None:
                yield "numbers_of_the_source", case

    def told(self, examples: int) -> str:
        """The constants that sizes come from, in a line; "" if there are none."""
        by_file: dict[str, list[str]] = {}
        if self.operation.sized is None:
            return ""
        used = {c.constant for c in self.chosen(examples, True) if c.constant}
        for constant in sorted(used):
            by_file.setdefault(constant.file, []).append(f"{constant.value} (line {constant.line})")
        shown = (f"{file}: {', '.join(found)}" for file, found in by_file.items())
        return f"sizes from constants of {'; '.join(shown)}" if by_file else ""

    def chosen(self, examples: int, dear: bool) -> list[Chosen]:
        """What fits into the budget of a check."""
        place = 0 if self.is_first else 1
        times = max(examples, GENERATED) / GENERATED
        every = _affordable(self._every(), EVERY[place] * times)
        asked = sorted(self._asked(), key=lambda chosen: chosen[:2])
        taken = _affordable((chosen for *_, chosen in asked), ASKED[place] * times * self.share)
        if dear and place == 0:
            past = [c for rank, price, c in asked if rank == 0 and price <= DEAR and c not in taken]
            taken += sorted(past, key=lambda c: (max(c.sizes.values()), c.price))[-1:]
        found: dict[str, Chosen] = {}
        for chosen in (*every, *taken):
            found.setdefault(chosen.name, chosen)
        return sorted(found.values(), key=lambda chosen: chosen.price)

    def _every(self) -> Iterator[Chosen]:
        axes = list(self._axes)
        for pair in itertools.combinations(axes, 2):
            found = [chosen for sizes in BOTH for chosen in self._of(dict(zip(pair, sizes)))]
            yield from [chosen for chosen in found if chosen.price <= BOTH_AT_MOST][:1]
        for size in (MANY, MOST):
            for axis in axes:
                yield from self._of({axis: size})

    def _asked(self) -> Iterator[tuple[int, float, Chosen]]:
        """Cases of constants, each after its rank and its price: past a constant first, then at it and below it."""
        for constant in self.constants.sizes:
            c = int(constant.value)
            for rank, size in enumerate((c + 1, c, c - 1, 2 * c + 1, 3 * c - 1, 3 * c)):
                for axis in self._axes:
                    for chosen in self._of({axis: size}, constant):
                        yield rank, chosen.price, chosen
            for pair in itertools.combinations(self._axes, 2):
                for chosen in self._of(dict(zip(pair, (c + 1, c + 2))), constant):
                    if chosen.price <= BOTH_AT_MOST:
                        yield 1, chosen.price, chosen
            # A kernel with a tile along each axis has a whole tile in the midst only where all axes are long.
            if len(self._axes) > 2:
                for chosen in self._of({axis: c + 1 + place for place, axis in enumerate(self._axes)}, constant):
                    if chosen.price <= BOTH_AT_MOST:
                        yield 0, chosen.price, chosen
        for one, other in itertools.permutations(self.constants.sizes, 2):
            for pair in itertools.combinations(self._axes, 2):
                for chosen in self._of(dict(zip(pair, (int(one.value) + 1, int(other.value) + 1))), max(one, other)):
                    if chosen.price <= BOTH_AT_MOST:
                        yield 2, chosen.price, chosen

    def probes(self) -> Iterator[tuple[Mapping[str, int], Case]]:
        """Small cases for `past`: one, and for each axis that it can be larger along another, with their sizes."""
        sized = self.operation.sized
        if sized is None or not self.is_first or not self.constants.comparisons:
            return
        for sizes in (dict(sized.axes), *({**sized.axes, axis: 4 * size + 1} for axis, size in sized.axes.items())):
            if self.allows(sizes):
                yield sizes, sized.make(sizes)(self.dtype)

    def past(self, observed: Sequence[Observed]) -> Iterator[tuple[str, Case]]:
        """Cases just past comparisons, and where both sides are equal, by what small cases have compared: `probes`."""
        sized = self.operation.sized
        assert sized is not None
        known = {chosen.name for chosen in self.chosen(GENERATED, True)}
        wanted = []
        for number, axis, size in equal_at(observed):
            comparison = self.constants.comparisons[number]
            constant = Constant(size, os.path.basename(comparison.file), comparison.line)
            wanted += [each for more in (1, 0) for each in self._of({axis: size + more}, constant)]
        for chosen in _affordable(sorted(wanted, key=lambda each: each.price), PAST * self.share):
            if chosen.name not in known:
                case = sized.make(chosen.sizes)(self.dtype)
                if self.claims.outside(self.operation, case, self.dtype) is None:
                    assert chosen.constant is not None
                    yield f"{chosen.name}_of_line_{chosen.constant.line}_of_{chosen.constant.file}", case

    def allows(self, sizes: Mapping[str, int]) -> bool:
        """Whether the operation and the claims take these sizes, and a case of them is affordable."""
        sized = self.operation.sized
        if sized is None or not all(_is_claimed(self.claims, axis, size) for axis, size in sizes.items()):
            return False
        return np.prod([*sizes.values()], dtype=float) <= PLACES and sized.allows(sizes)

    def price(self, sizes: Mapping[str, int]) -> float:
        """What a case of these sizes costs, about, in elements that the interpreter computes."""
        sized = self.operation.sized
        assert sized is not None
        return self._price(sizes, sized.largest(sizes))

    @property
    def is_first(self) -> bool:
        """Whether most large cases are of this dtype."""
        claimed = list(self.claims.dtypes) or ["float32"]
        return self.dtype.name == ("float32" if "float32" in claimed else claimed[0])

    @property
    def _axes(self) -> Mapping[str, int]:
        assert self.operation.sized is not None
        return self.operation.sized.axes

    def _of(self, long: Mapping[str, int], constant: Constant | None = None) -> Iterator[Chosen]:
        """The case of which some axes have these sizes, if the operation takes them and it is not too large."""
        sized = self.operation.sized
        assert sized is not None
        sizes = {**sized.axes, **long}
        claimed = {axis: size for axis, size in long.items() if _is_claimed(self.claims, axis, size)}
        places = np.prod([*sizes.values()], dtype=float)
        if len(claimed) < len(long) or places > CONTRACTED or not sized.allows(sizes):
            return
        price = self._price(sizes, sized.largest(sizes))
        if places > PLACES and price > BOTH_AT_MOST:
            return
        name = "_".join(f"{'rows' if axis == LEADING else axis}_{size}" for axis, size in long.items())
        yield Chosen(sizes, name, price, constant)

    def _price(self, sizes: Mapping[str, int], largest: float) -> float:
        elements, rows = largest, 0.0
        for written in self.operation.axes.values():
            axes = notation.parse(written)
            named = [axis for axis in axes if axis == LEADING or not axis.isdecimal()]
            if all(axis in sizes for axis in named):
                shape = notation.shape(axes, sizes, (sizes[LEADING],) if LEADING in sizes else ())
                elements = max(elements, float(np.prod(shape, dtype=float)))
                rows = max(rows, float(np.prod([sizes[axis] for axis in named[:-1]], dtype=float)))
        return CALL + elements + ROW * rows

    def _of_values(self) -> Case:
        """Numbers at, next to, past and below the values that the source compares with."""
        sized = self.operation.sized
        assert sized is not None
        wanted = {axis: MODEST[place % len(MODEST)] for place, axis in enumerate(sized.axes)}
        case = sized.make(wanted if sized.allows(wanted) else sized.axes)(self.dtype)
        rng, changed = np.random.default_rng(23), {}
        for name, array in case.inputs.items():
            if is_floating(array) and name not in self.operation.ordinary:
                numbers = self._around_values(array.dtype)
                changed[name] = array.copy()
                places = rng.permutation(array.size)[: min(len(numbers), array.size // 2)]
                changed[name].flat[places] = rng.permutation(numbers)[: len(places)]
        return case.with_inputs(**changed)

    def _around_values(self, dtype: np.dtype) -> np.ndarray:
        """The values that the source compares with, their neighbours in a dtype, and numbers past and below them."""
        values, largest = np.array([constant.value for constant in self.constants.values]), dtype_of(dtype).largest
        with np.errstate(over="ignore"):
            at = np.concatenate([values, -values]).astype(dtype)
            # A type without infinities has NaN in their place, and no neighbour on that side.
            ends = [np.nextafter(at, np.array(end, dtype)) for end in (largest, -largest)]
            return np.concatenate([at, *ends, *[(at.astype(np.float64) * by).astype(dtype) for by in (0.75, 1.25)]])


def _is_claimed(claims: Claims, axis: str, size: int) -> bool:
    limit = claims.sizes.get(axis)
    return limit is None or (limit[0] <= size <= limit[1] if isinstance(limit, tuple) else size % limit == 0)


def _affordable(wanted: Iterable[Chosen], budget: float) -> list[Chosen]:
    """Those that fit into a budget, one after another, each once."""
    taken: dict[str, Chosen] = {}
    for chosen in wanted:
        if chosen.name not in taken and chosen.price <= budget:
            taken[chosen.name] = chosen
            budget -= chosen.price
    return list(taken.values())
