"""The notation for the axes of tensors: ``"... cols"``, ``"batch heads seq dim"``, ``"total 4"``, ``"batch+1"``.

Axes of the same name have the same length in all tensors of a call. ``...`` stands for any number of axes, the same in
all tensors that have it. ``4`` is an axis of length 4. ``batch+1`` is an axis one longer than ``batch``.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

LEADING = "..."
Shape = tuple[int, ...]
Axes = tuple[str, ...]
_NAMED = re.compile(r"([^\W\d]\w*)(?:\+(\d+))?")


# The fewest elements of an axis whose ends can lie that far apart with a stride that fits into 32 bits.
SHORTEST_AXIS = 3


def parse(notation: str) -> Axes:
    """Return the axes of a notation, one string each.

    Raises:
        TypeError: the notation is not a string.
        ValueError: an axis is neither a name, a name and a number, a length nor ``...``, or ``...`` comes twice.
    """
    if not isinstance(notation, str):
        raise TypeError(f"axes must be a string such as '... cols', not {notation!r}")
    axes = tuple(notation.split())
    for axis in axes:
        if axis != LEADING and not axis.isdecimal() and not _NAMED.fullmatch(axis):
            raise ValueError(f"axes {notation!r}: {axis!r} is no axis; write a name, name+1, a length or ...")
    if axes.count(LEADING) > 1:
        raise ValueError(f"axes {notation!r}: ... may stand there once")
    return axes


def split(axis: str) -> tuple[str | None, int]:
    """Return an axis's name and the number added to its size, or None and the length of an axis of fixed length."""
    if axis.isdecimal():
        return None, int(axis)
    found = _NAMED.fullmatch(axis)
    assert found is not None, axis
    return found[1], int(found[2] or 0)


def names(axes: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct names among the axes, without fixed lengths and ``...``."""
    return tuple(dict.fromkeys(name for axis in axes if axis != LEADING and (name := split(axis)[0]) is not None))


def shape(axes: Sequence[str], sizes: Mapping[str, int], leading: Shape = ()) -> Shape:
    """Return the shape of a tensor from its axes, the sizes of the named axes and the sizes for ``...``."""
    found: list[int] = []
    for axis in axes:
        if axis == LEADING:
            found += leading
        else:
            name, more = split(axis)
            found.append(more if name is None else sizes[name] + more)
    return tuple(found)


def sizes(written: Mapping[str, str], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the sizes of the named axes of tensors with fitting shapes, and the leading sizes under "...".

    Args:
        written: the notation of each tensor's axes, by name.
        shapes: the shapes of the present tensors, by name.
    """
    known: dict[str, Any] = {}
    for name, notation in written.items():
        if name in shapes:
            fits(parse(notation), shapes[name], known)
    return known


def fits(axes: Sequence[str], given: Shape, known: dict[str, Any]) -> bool:
    """Return whether a shape fits its axes. Add sizes that are not known yet to `known`, that of "..." as a shape."""
    axes = tuple(axes)
    if LEADING in axes:
        at = axes.index(LEADING)
        after = len(axes) - at - 1
        if len(given) < at + after:
            return False
        leading = given[at : len(given) - after]
        if known.setdefault(LEADING, leading) != leading:
            return False
        axes, given = axes[:at] + axes[at + 1 :], given[:at] + given[len(given) - after :]
    if len(axes) != len(given):
        return False
    for axis, size in zip(axes, given):
        name, more = split(axis)
        if size != (more if name is None else known.setdefault(name, size - more) + more):
            return False
    return True
