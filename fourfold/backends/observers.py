"""Events that backends report to observers of calls: the lines of kernels that ran, and interpreted launches."""

import ast
import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType

# A part of a line has a number of its own instead of a line: see `part_of_line`.
PARTS = 1 << 24


def part_of_line(line: int, number: int) -> int:
    """Return the place of a part of a line, such as one side of a conditional expression, in place of the line."""
    return number * PARTS + line


def conditional_parts(tree: ast.AST) -> Iterator[tuple[ast.IfExp, int, int]]:
    """Yield each conditional expression of a source with the numbers of its two sides among the parts of its line.

    The numbers follow from the order of the expressions, as Triton removes the indentation of a source. Number 1 is
    that of a statement behind the colon of a compound one.
    """
    conditionals = [node for node in ast.walk(tree) if isinstance(node, ast.IfExp)]
    ordered = sorted(conditionals, key=lambda node: (node.lineno, node.col_offset, -(node.end_col_offset or 0)))
    for _, of_line in itertools.groupby(ordered, lambda node: node.lineno):
        for place, node in enumerate(of_line):
            yield node, 2 * place + 2, 2 * place + 3


def spans(tree: ast.AST) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Yield the place of each part of a line, with the positions of its begin and end: line, and column in bytes."""
    for conditional, *numbers in conditional_parts(tree):
        for number, side in zip(numbers, (conditional.body, conditional.orelse)):
            yield part_of_line(conditional.lineno, number), *_span(side, side)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.stmt) and isinstance(body, list) and body[0].lineno == node.lineno:
            yield part_of_line(node.lineno, 1), *_span(body[0], body[-1])


def _span(first: ast.expr | ast.stmt, last: ast.expr | ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    return (first.lineno, first.col_offset), (last.end_lineno or last.lineno, last.end_col_offset or 0)


@functools.lru_cache(64)
def spans_of(file: str) -> tuple[tuple[int, tuple[int, int], tuple[int, int]], ...]:
    """Return the spans of a file's parts; none if it cannot be read."""
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return tuple(spans(ast.parse(Path(file).read_bytes())))
    return ()


def parts_of_code(file: str, code: CodeType) -> dict[int, tuple[int, ...]]:
    """Return the parts of lines that each instruction of a file's function belongs to, by its offset in bytes."""
    file_spans, parts_by_offset = spans_of(file), dict[int, tuple[int, ...]]()
    for number, (line, last, column, end) in enumerate(code.co_positions() if file_spans else ()):
        if line is not None and last is not None and column is not None and end is not None:
            parts = tuple(part for part, begin, past in file_spans if begin <= (line, column) and (last, end) <= past)
            if parts:
                parts_by_offset[2 * number] = parts
    return parts_by_offset


class Marks:
    """The marks in the sources of kernels.

    Attributes:
        ran: the numbers of the reached marks.
    """

    def __init__(self) -> None:
        self.ran: dict[int, bool] = {}
        self._places: list[tuple[str, tuple[int, ...]]] = []
        self._adding = threading.Lock()

    def add(self, file: str, lines: tuple[int, ...]) -> int:
        """Add a mark before these lines, and return its number."""
        with self._adding:
            self._places.append((os.path.realpath(file), lines))
            return len(self._places) - 1

    def lines(self, file: str) -> set[int]:
        """Return the lines of a file that were reached."""
        places = list(enumerate(self._places))
        return {line for number, (source, lines) in places if source == file and number in self.ran for line in lines}


# Those of this process.
marks = Marks()
# Gives a context for each launch that is interpreted: within it Python's own code is the interpreter's, not a kernel's.
around_launch: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
