"""What observers of calls learn from backends: the lines of kernels that ran, and when the interpreter runs."""

import contextlib
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


class Marks:
    """The marks in the sources of kernels.

    Attributes:
        ran: the numbers of those that were reached.
    """

    def __init__(self) -> None:
        self.ran: dict[int, bool] = {}
        self._places: list[tuple[str, tuple[int, ...]]] = []
        self._adding = threading.Lock()

    def add(self, file: str, lines: tuple[int, ...]) -> int:
        """The number of a new mark, which stands before these lines."""
        with self._adding:
            self._places.append((os.path.realpath(file), lines))
            return len(self._places) - 1

    def lines(self, file: str) -> set[int]:
        """The lines of a file that were reached."""
        places = list(enumerate(self._places))
        return {line for number, (of, lines) in places if of == file and number in self.ran for line in lines}


# Those of this process.
marks = Marks()
# Gives a context for each launch that is interpreted: within it Python's own code is the interpreter's, not a kernel's.
around_launch: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
