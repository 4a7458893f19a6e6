"""The sizes that a declaration allows for named axes, and strategies to draw them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fourfold.inputs.arrays import FEW_ELEMENTS, GENERATORS, random_size, sizes
from fourfold.operations import axes as notation
from fourfold.operations.axes import LEADING, Axes


@dataclass(frozen=True)
class Extent:
    """The allowed sizes of an axis: from `low` in steps up to `high`, or some `choices`, in ascending order."""

    low: int = 0
    high: int | None = None
    step: int = 1
    choices: tuple[int, ...] = ()

    def nearest(self, size: int) -> int:
        """Return the largest allowed size up to `size`, or the least allowed size if there is none."""
        if self.choices:
            return max((choice for choice in self.choices if choice <= size), default=self.choices[0])
        size = max(self.low, size if self.high is None else min(size, self.high))
        return self.low + (size - self.low) // self.step * self.step

    def not_empty(self) -> "Extent":
        """Return the same extent without the size 0."""
        if self.choices:
            return Extent(choices=tuple(size for size in self.choices if size) or (1,))
        return Extent(self.low or self.step, self.high, self.step)

    def within(self, limit: tuple[int, int] | int) -> "Extent | None":
        """Return the sizes between the least and the largest of a pair, or the multiples of a number; None if none."""
        low, high = limit if isinstance(limit, tuple) else (0, None)
        divisor = 1 if isinstance(limit, tuple) else limit
        if self.choices:
            top = math.inf if high is None else high
            choices = tuple(size for size in self.choices if low <= size <= top and size % divisor == 0)
            return Extent(choices=choices) if choices else None
        step = math.lcm(self.step, divisor)
        first = self.low + max(-(-(low - self.low) // self.step), 0) * self.step
        first = next((size for size in range(first, first + step, self.step) if size % divisor == 0), -1)
        last = min((end for end in (self.high, high) if end is not None), default=None)
        return None if first < 0 or (last is not None and first > last) else Extent(first, last, step)


def extent(name: str, value: Any) -> Extent:
    """Return the sizes that a declaration gives an axis.

    Args:
        name: the name of the axis.
        value: a pair of the least and the largest size (None: any), a range, a list of sizes, or one size.

    Raises:
        ValueError: `value` has another form, or contains no size. The message names the axis.
    """
    if isinstance(value, range) and len(value) and value.step > 0 and value.start >= 0:
        return Extent(value[0], value[-1], value.step)
    if isinstance(value, int) and value >= 0:
        return Extent(choices=(value,))
    if isinstance(value, tuple) and len(value) == 2:
        low, high = value
        if isinstance(low, int) and low >= 0 and (high is None or (isinstance(high, int) and high >= low)):
            return Extent(low, high)
    if isinstance(value, list) and value and all(isinstance(size, int) and size >= 0 for size in value):
        return Extent(choices=tuple(sorted(set(value))))
    expected = "a pair (least, largest), a range, a list of sizes or one size"
    raise ValueError(f"sizes of {name} must be {expected}, none below 0, not {value!r}")


def room(name: str, tensors: Sequence[Axes], sizes: Mapping[str, int], elements: int) -> int:
    """Return the largest size of an axis, at least 1, that keeps each tensor within `elements`, given the others."""
    limit = elements
    sizes = {axis: max(size, 1) for axis, size in sizes.items()}  # an empty axis may become one of 1
    for axes in tensors:
        if name in axes or name in notation.names(axes):
            divisor = 1
            for axis in axes:
                if name not in (axis, *notation.names((axis,))):
                    divisor *= sizes[LEADING] if axis == LEADING else max(notation.split(axis).of(sizes), 1)
                elif axis != LEADING:
                    length = notation.split(axis)
                    divisor *= replace(length, more=0).of({**sizes, name: 1})
            limit = min(limit, elements // divisor)
    return max(limit, 1)


@st.composite
def draw_sizes(
    draw: st.DrawFn, names: Sequence[str], tensors: Sequence[Axes], allowed: Mapping[str, Extent], elements: int
) -> dict[str, int]:
    """Draw sizes for which no tensor has more than `elements` elements, unless all allowed sizes are larger.

    Half of the time no axis is long. Otherwise one axis takes any share of the elements, and the others the rest.
    """
    # Until an axis is chosen, it takes the room of its least size.
    extents_by_name = {name: allowed[name].nearest(0) for name in names}
    if elements <= FEW_ELEMENTS:
        # The last axis gets its share first: most reductions are along it, and one of one element shows nothing.
        for name in reversed(names):
            limit = room(name, tensors, extents_by_name, elements)
            extents_by_name[name] = allowed[name].nearest(draw(sizes(limit, elements)))
        return extents_by_name
    rng = draw(GENERATORS)
    depth = max([len(axes) for axes in tensors], default=1)
    modest = int(np.ceil(elements ** (1 / max(depth, 1)))) if rng.random() < 0.5 else elements
    for place in rng.permutation(len(names)):
        name, generator = names[place], draw(GENERATORS)
        size = random_size(generator, min(room(name, tensors, extents_by_name, elements), modest))
        # At the rate of an operation with two axes, one of many axes would often be empty.
        rare = size == 0 and generator.random() > 2 / len(names)
        extents_by_name[name] = allowed[name].nearest(1 if rare else size)
    return extents_by_name
