"""Covering arrays: few combinations of several choices, such that each pair of choices comes together in one of them.

Most faults of software take one choice, or two at once (Kuhn, Wallace and Gallo, Software Fault Interactions and
Implications for Software Testing, IEEE Transactions on Software Engineering 30, 2004).
"""

import functools
import itertools
from collections.abc import Sequence

Row = tuple[int, ...]


@functools.lru_cache
def covering(levels: tuple[int, ...]) -> tuple[Row, ...]:
    """Rows of one choice for each factor, among which each pair of choices of two factors comes together once or more.

    Args:
        levels: how many choices each factor has.

    Returns:
        the rows, in an order that is always the same. The first one has the first choice of each factor.
    """
    pairs = itertools.combinations(range(len(levels)), 2)
    open_ = {((f, i), (g, j)): None for f, g in pairs for i in range(levels[f]) for j in range(levels[g])}
    rows = [(0,) * len(levels)]
    _close(open_, rows[0])
    while open_:
        (first, second), *_ = open_
        row = _row(levels, dict((first, second)), open_, len(rows))
        _close(open_, row)
        rows.append(row)
    return tuple(rows)


def _row(levels: Sequence[int], chosen: dict[int, int], open_: dict, turn: int) -> Row:
    """A row with the given choices, whose other choices close as many pairs as they can; among equals, in turn."""
    for factor in range(len(levels)):
        if factor in chosen:
            continue

        def closes(level: int, factor: int = factor) -> int:
            return sum(_pair((factor, level), other) in open_ for other in chosen.items())

        turns = [(level + turn) % levels[factor] for level in range(levels[factor])]
        chosen[factor] = max(turns, key=closes)
    return tuple(chosen[factor] for factor in range(len(levels)))


def _pair(one: tuple[int, int], other: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return (one, other) if one < other else (other, one)


def _close(open_: dict, row: Row) -> None:
    for pair in itertools.combinations(enumerate(row), 2):
        open_.pop(pair, None)
