"""Events that backends report to observers of calls: the lines of kernels that ran, and interpreted launches."""

import ast
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

# A part of a line has a number of its own in place of a line: see `part_of_line`.
PARTS = 1 << 24


def part_of_line(line: int, number: int) -> int:
    """Return the place of a part of a line, such as one side of a conditional expression, in place of the line."""
    return number * PARTS + line


def conditional_parts(tree: ast.AST) -> Iterator[tuple[ast.IfExp, int, int]]:
    """Yield each conditional expression of a source with the numbers of its two sides among the parts of its line.

    The numbers follow from the order of the expressions, as Triton removes the indentation of a source. Number 1 is
    that of a statement behind the colon of a compound one.
    """
    found = [node for node in ast.walk(tree) if isinstance(node, ast.IfExp)]
    ordered = sorted(found, key=lambda node: (node.lineno, node.col_offset, -(node.end_col_offset or 0)))
    for _, of_line in itertools.groupby(ordered, lambda node: node.lineno):
        for place, node in enumerate(of_line):
            yield node, 2 * place + 2, 2 * place + 3


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
        return {line for number, (of, lines) in places if of == file and number in self.ran for line in lines}


# Those of this process.
marks = Marks()
# Gives a context for each launch that is interpreted: within it Python's own code is the interpreter's, not a kernel's.
around_launch: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
