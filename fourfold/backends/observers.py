"""Events that backends report to observers of calls: the lines of kernels that ran, and interpreted launches."""

import contextlib
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


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
