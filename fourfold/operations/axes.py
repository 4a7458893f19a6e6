"""The notation for the axes of tensors: ``"... cols"``, ``"batch heads seq dim"``, ``"total 4"``, ``"batch+1"``.

Axes of the same name have the same length in all tensors of a call. ``...`` stands for any number of axes, the same in
all tensors that have it. ``4`` is an axis of length 4. ``batch+1`` is an axis one longer than ``batch``, ``2*dim`` one
twice as long as ``dim``, and ``group*heads`` one as long as the product of two sizes. ``cols/128`` is an axis with an
element for each block of 128 columns, the last of which may be shorter. ``n[i]`` is an axis whose size each tensor of a
list has for itself: ``n[0]``, ``n[1]``, ….
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

LEADING = "..."
Shape = tuple[int, ...]
Axes = tuple[str, ...]
_FACTOR = r"(?:[^\W\d]\w*(?:\[(?:i|\d+)\])?|\d+)"
_AXIS = re.compile(rf"({_FACTOR}(?:\*{_FACTOR})*)(?:/([1-9]\d*))?(?:\+(\d+))?")


# The fewest elements of an axis whose ends can lie that far apart with a stride that fits into 32 bits.
SHORTEST_AXIS = 3


@dataclass(frozen=True)
class Length:
    """The length of one axis: `factor` times the sizes of some named axes, or the blocks in this, and `more`."""

    factor: int
    names: tuple[str, ...]
    more: int
    block: int = 1

    @property
    def name(self) -> str | None:
        """The name of an axis that is the size of one name, perhaps plus a number; None for any other axis."""
        return self.names[0] if len(self.names) == 1 and self.factor == self.block == 1 else None

    def of(self, sizes: Mapping[str, int]) -> int:
        """Return the length for the sizes of the named axes."""
        return -(-self.factor * math.prod(sizes[name] for name in self.names) // self.block) + self.more

    def fits(self, size: int, sizes: dict[str, Any]) -> bool:
        """Return whether the length may be `size`. Add the size of a name to `sizes` if it is the only unknown one.

        The size of an axis of blocks fits as long as a name is unknown.
        """
        if self.more == 0 and self.factor == self.block == 1 and len(self.names) == 1:
            if (name := self.names[0]) not in sizes:
                sizes[name] = size
            return bool(sizes[name] == size)
        # torch.compile traces neither math.prod of a generator nor divmod.
        unknown, rest = [name for name in self.names if name not in sizes], self.factor
        for name in self.names:
            rest = rest * sizes[name] if name in sizes else rest
        if not unknown or not rest:
            return bool(size == -(-rest // self.block) + self.more)
        if self.block > 1:
            return True
        quotient, remainder = (size - self.more) // rest, (size - self.more) % rest
        if len(unknown) == 1 and not remainder:
            sizes[unknown[0]] = quotient
        return quotient >= 0 and not remainder


def parse(notation: str) -> Axes:
    """Return the axes of a notation, one string each.

    Raises:
        TypeError: the notation is not a string.
        ValueError: an axis is neither a name, a product, blocks of either, one of these and a number, a length nor
            ``...``, or ``...`` comes twice.
    """
    if not isinstance(notation, str):
        raise TypeError(f"axes must be a string such as '... cols', not {notation!r}")
    axes = tuple(notation.split())
    for axis in axes:
        if axis != LEADING and not _AXIS.fullmatch(axis):
            raise ValueError(
                f"axes {notation!r}: {axis!r} is no axis; write a name, name+1, 2*name, name/128, a length or ...,"
                " without spaces"
            )
        if axis != LEADING and len(set(split(axis).names)) < len(split(axis).names):
            raise ValueError(f"axes {notation!r}: {axis!r} names an axis twice")
    if axes.count(LEADING) > 1:
        raise ValueError(f"axes {notation!r}: ... may stand there once")
    return axes


@cache
def split(axis: str) -> Length:
    """Return the length that an axis describes. It must not be ``...``."""
    match = _AXIS.fullmatch(axis)
    assert match is not None, axis
    factors = match[1].split("*")
    product = math.prod(int(factor) for factor in factors if factor.isdecimal())
    return Length(
        product, tuple(factor for factor in factors if not factor.isdecimal()), int(match[3] or 0), int(match[2] or 1)
    )


def names(axes: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct names among the axes, without fixed lengths and ``...``."""
    return tuple(dict.fromkeys(name for axis in axes if axis != LEADING for name in split(axis).names))


def last(tensors: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the distinct names in the last axes of some tensors, ``...`` included, but not in batch+1 or cols/128."""
    ends = [axes[-1] for axes in tensors if axes]
    lists = [
        (end,) if end == LEADING else () if split(end).more or split(end).block > 1 else split(end).names
        for end in ends
    ]
    return tuple(dict.fromkeys(name for names in lists for name in names))


def blocks(tensors: Iterable[Sequence[str]]) -> dict[str, int]:
    """Return the sizes of the blocks into which axes are divided, by name: of cols/128, 128 by the name cols."""
    lengths = [split(axis) for axes in tensors for axis in axes if axis != LEADING]
    return {name: length.block for length in lengths if length.block > 1 for name in length.names}


def indexed_axis(axis: str) -> str:
    """Return the notation ``n[i]`` of an axis ``n[0]``; any other axis as it is."""
    return re.sub(r"\[\d+\]", "[i]", axis)


def item_axes(axes: Sequence[str], place: int) -> Axes:
    """Return the axes of the tensor at a place of a list."""
    return tuple(axis.replace("[i]", f"[{place}]") for axis in axes)


def shape(axes: Sequence[str], sizes: Mapping[str, int], leading: Shape = ()) -> Shape:
    """Return the shape of a tensor from its axes, the sizes of the named axes and the sizes for ``...``."""
    extents: list[int] = []
    for axis in axes:
        extents += leading if axis == LEADING else (split(axis).of(sizes),)
    return tuple(extents)


def sizes(axes: Mapping[str, Sequence[str]], shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], str | None]:
    """Return the sizes of the named axes, the leading sizes under "...", and the first tensor that does not fit them.

    Args:
        axes: the axes of each tensor, by name.
        shapes: the shapes of the present tensors, by name.
    """
    values: dict[str, Any] = {}
    present = [name for name in axes if name in shapes]
    # The sizes in a product may follow from a later tensor.
    misfits = [name for _ in range(2) for name in present if not fits(axes[name], shapes[name], values)]
    return values, misfits[0] if misfits else None


def fits(axes: Sequence[str], shape: Shape, sizes: dict[str, Any]) -> bool:
    """Return whether a shape fits its axes. Add sizes that are not known yet to `sizes`, that of "..." as a shape.

    A product of sizes fits any multiple of those that are known. See `sizes` for several tensors.
    """
    return pattern(tuple(axes)).fits(shape, sizes)


@dataclass(frozen=True)
class Pattern:
    """The axes of a tensor, split beforehand, so that torch.compile traces comparisons alone."""

    before: tuple[Length, ...]
    has_leading: bool
    after: tuple[Length, ...]

    def fits(self, shape: Shape, sizes: dict[str, Any]) -> bool:
        """Return whether a shape fits: see `fourfold.operations.axes.fits`."""
        head, tail = len(self.before), len(self.after)
        if len(shape) < head + tail or (not self.has_leading and len(shape) > head + tail):
            return False
        end = len(shape) - tail
        if self.has_leading:
            leading = shape[head:end]
            if LEADING not in sizes:
                sizes[LEADING] = leading
            elif sizes[LEADING] != leading:
                return False
        for length, size in zip((*self.before, *self.after), (*shape[:head], *shape[end:])):
            if not length.fits(size, sizes):
                return False
        return True


@cache
def pattern(axes: Axes) -> Pattern:
    """Return the pattern of some axes."""
    split_at = axes.index(LEADING) if LEADING in axes else len(axes)
    lengths = [None if axis == LEADING else split(axis) for axis in axes]
    head, tail = ([length for length in part if length] for part in (lengths[:split_at], lengths[split_at:]))
    return Pattern(tuple(head), LEADING in axes, tuple(tail))
