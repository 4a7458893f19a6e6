"""Covering arrays: few combinations of several choices that contain each pair of choices.

Most software faults depend on one choice, or on two at once (Kuhn, Wallace and Gallo, Software Fault Interactions and
Implications for Software Testing, IEEE Transactions on Software Engineering 30, 2004).
"""

import functools
import itertools
from collections.abc import Sequence

Row = tuple[int, ...]


@functools.lru_cache
def covering(levels: tuple[int, ...]) -> tuple[Row, ...]:
    """Return rows of one choice for each factor that contain each pair of choices of two factors at least once.

    Args:
        levels: the number of choices of each factor.

    Returns:
        the rows, always in the same order. The first row has the first choice of each factor.
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


def _row(levels: Sequence[int], levels_by_factor: dict[int, int], open_: dict, turn: int) -> Row:
    """Return a row with the chosen levels. Each other choice closes the most open pairs; `turn` breaks ties."""
    for factor in range(len(levels)):
        if factor in levels_by_factor:
            continue

        def closes(level: int, factor: int = factor) -> int:
            return sum(_pair((factor, level), other) in open_ for other in levels_by_factor.items())

        turns = [(level + turn) % levels[factor] for level in range(levels[factor])]
        levels_by_factor[factor] = max(turns, key=closes)
    return tuple(levels_by_factor[factor] for factor in range(len(levels)))


def _pair(first: tuple[int, int], second: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return (first, second) if first < second else (second, first)


def _close(open_: dict, row: Row) -> None:
    for pair in itertools.combinations(enumerate(row), 2):
        open_.pop(pair, None)
