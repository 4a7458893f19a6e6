"""The notation for the axes of tensors: ``"... cols"``, ``"batch heads seq dim"``, ``"total 4"``, ``"batch+1"``.

Equal names are axes of equal length in all tensors of a call. ``...`` is any number of axes, alike in all tensors that
have it. ``4`` is an axis of that length. ``batch+1`` is an axis that is longer by one than ``batch``.
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
    """The axes of a notation, one string each.

    Raises:
        TypeError: the notation is no string.
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
    """The name of an axis and what is added to its size; None and the length of an axis of fixed length."""
    if axis.isdecimal():
        return None, int(axis)
    found = _NAMED.fullmatch(axis)
    assert found is not None, axis
    return found[1], int(found[2] or 0)


def names(axes: Sequence[str]) -> tuple[str, ...]:
    """The names among the axes, each once: no fixed lengths, and not ``...``."""
    return tuple(dict.fromkeys(name for axis in axes if axis != LEADING and (name := split(axis)[0]) is not None))


def shape(axes: Sequence[str], sizes: Mapping[str, int], leading: Shape = ()) -> Shape:
    """The shape of a tensor with these axes, of the sizes of the named ones and those that ``...`` stands for."""
    found: list[int] = []
    for axis in axes:
        if axis == LEADING:
            found += leading
        else:
            name, more = split(axis)
            found.append(more if name is None else sizes[name] + more)
    return tuple(found)


def sizes(written: Mapping[str, str], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """The sizes of the named axes of tensors that fit, and under "..." the leading ones.

    Args:
        written: the notation of each tensor's axes, by name.
        shapes: of the tensors that there are.
    """
    known: dict[str, Any] = {}
    for name, notation in written.items():
        if name in shapes:
            fits(parse(notation), shapes[name], known)
    return known


def fits(axes: Sequence[str], given: Shape, known: dict[str, Any]) -> bool:
    """Whether a shape is what its axes say. Sizes that are not known yet are noted in `known`, "..." as a shape."""
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
