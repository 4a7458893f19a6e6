"""Which lines of an implementation's files have run.

Python's own code is watched while an implementation is called: by `sys.monitoring` where Python has it, and by a trace
function elsewhere. Neither sees what Triton's interpreter makes of a kernel quickly enough. So a kernel's source gets
marks: see `fourfold.backends.triton.interpreter.marks`.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

from fourfold.backends import observers
from fourfold.backends.observers import Marks

# From Python 3.12 on.
monitoring: Any = getattr(sys, "monitoring", None)
# Tools of `sys.monitoring` that are free unless somebody else has come first. The others have names of their own.
_TOOLS = (3, 4, 1, 2)
_ABSENT: Any = object()


class LineRecorder:
    """The lines that have run, of the files that are watched.

    Attributes:
        blind: whether it has missed calls, as somebody else traces the program.
        users: how many have asked for it, and are not done.
    """

    def __init__(self, marks: Marks) -> None:
        self.blind, self.users = False, 0
        self._marks = marks
        # By file: the lines of each statement, with the first of them; and the first lines of those that have run.
        self._statements: dict[str, dict[int, int]] = {}
        self._ran: dict[str, set[int]] = {}
        # By the names that code has for its file: the file's real name; None if it is not watched.
        self._files: dict[str, str | None] = {}

    def watch(self, statements: Mapping[str, Mapping[int, int]]) -> None:
        """Watch more files.

        Args:
            statements: by a file's real name, the lines of its statements, with the first line of each.
        """
        for file, lines in statements.items():
            self._ran.setdefault(file, set())
            known = self._statements.setdefault(file, {})
            if not lines.keys() <= known.keys():
                known.update(lines)
                self._files = {}
                self._more()

    def lines(self) -> dict[str, set[int]]:
        """By file, the first line of each statement that has run."""
        return {file: ran | self._marks.lines(file) for file, ran in self._ran.items()}

    def _file(self, name: str) -> str | None:
        """The real name of a file that is watched."""
        file = self._files.get(name, _ABSENT)
        if file is _ABSENT:
            real = os.path.realpath(name)
            file = self._files[name] = real if real in self._statements else None
        return file

    def _more(self) -> None:
        """There is more to watch."""

    def begin(self) -> bool:
        """An implementation is called in this thread; gives what `end` is to be told."""
        return False

    def end(self, begun: bool) -> None:
        """It has returned, or has raised."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it, what this thread runs is none of an implementation's own code in Python."""
        yield

    def close(self) -> None:
        """Watch no more, if nobody asks for it."""
        if not self.users:
            self._statements, self._files = {}, {}
            self._stop()

    def _stop(self) -> None:
        """There is nothing to watch."""


class Tracer(LineRecorder):
    """Watches by a trace function, while an implementation is called. It does nothing where there is one already."""

    def __init__(self, marks: Marks) -> None:
        super().__init__(marks)
        self._trace = self._called  # one object, by which it is known
        # By the first line and the file of a function: its own trace function; None if all its lines have run.
        self._functions: dict[tuple[str, int, str], Callable[..., Any] | None] = {}
        self._left: dict[str, set[int]] = {}

    def _more(self) -> None:
        self._functions = {}
        self._left = {
            file: set(lines.values()) - self._ran[file] - self._marks.lines(file)
            for file, lines in self._statements.items()
        }

    def begin(self) -> bool:
        """Trace this thread."""
        if not any(self._left.values()):
            return False
        before = sys.gettrace()
        if before is not None:
            self.blind |= before is not self._trace
            return False
        sys.settrace(self._trace)
        return True

    def end(self, begun: bool) -> None:
        """Trace it no more. What the implementation has put in the place of the trace function stays."""
        if begun and sys.gettrace() is self._trace:
            sys.settrace(None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it, nothing is traced."""
        if sys.gettrace() is not self._trace:
            yield
            return
        sys.settrace(None)
        try:
            yield
        finally:
            if sys.gettrace() is None:
                sys.settrace(self._trace)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        try:
            file = self._files[code.co_filename]
        except KeyError:
            file = self._file(code.co_filename)
        if file is None:
            return None
        key = file, code.co_firstlineno, code.co_name
        trace = self._functions.get(key, _ABSENT)
        if trace is _ABSENT:
            trace = self._functions[key] = self._of_function(file, code)
        return trace

    def _of_function(self, file: str, code: CodeType) -> Callable[..., Any] | None:
        """The trace function of a function. It ends when all statements of the function have run."""
        statements, ran, left_in_file = self._statements[file], self._ran[file], self._left[file]
        lines = (line for _, _, line in code.co_lines() if line is not None)
        left = {statements[line] for line in lines if line in statements} - ran
        key = file, code.co_firstlineno, code.co_name

        def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
            first = statements.get(frame.f_lineno)
            if event == "line" and first in left:
                ran.add(first)
                left.discard(first)
                left_in_file.discard(first)
                if not left:
                    self._functions[key] = None
                    return None
            return trace

        return trace if left else None

    def _stop(self) -> None:
        self._left = {}


class Monitor(LineRecorder):
    """Watches by `sys.monitoring`: each line tells of itself once. It does nothing where all tools are taken."""

    def __init__(self, marks: Marks) -> None:
        super().__init__(marks)
        self._tool: int | None = None
        self._code: list[CodeType] = []

    def _more(self) -> None:
        if self._tool is None:
            free = (tool for tool in _TOOLS if monitoring.get_tool(tool) is None)
            self._tool = next(free, None)
            if self._tool is None:
                self.blind = True
                return
            monitoring.use_tool_id(self._tool, "fourfold")
            monitoring.register_callback(self._tool, monitoring.events.PY_START, self._started)
            monitoring.register_callback(self._tool, monitoring.events.LINE, self._reached)
            monitoring.set_events(self._tool, monitoring.events.PY_START)
        monitoring.restart_events()  # functions that were started before may be of the files that are new

    def _started(self, code: CodeType, offset: int) -> Any:
        """A function is called for the first time: of an implementation, its lines tell of themselves."""
        if self._file(code.co_filename) is not None and self._tool is not None:
            self._code.append(code)
            monitoring.set_local_events(self._tool, code, monitoring.events.LINE)
        return monitoring.DISABLE

    def _reached(self, code: CodeType, line: int) -> Any:
        """A line is reached for the first time."""
        file = self._file(code.co_filename)
        first = None if file is None else self._statements[file].get(line)
        if file is not None and first is not None:
            self._ran[file].add(first)
        return monitoring.DISABLE

    def _stop(self) -> None:
        """Give the tool back."""
        if self._tool is None:
            return
        for code in self._code:
            monitoring.set_local_events(self._tool, code, monitoring.events.NO_EVENTS)
        monitoring.set_events(self._tool, monitoring.events.NO_EVENTS)
        for event in (monitoring.events.PY_START, monitoring.events.LINE):
            monitoring.register_callback(self._tool, event, None)
        monitoring.free_tool_id(self._tool)
        self._tool, self._code = None, []


def new_recorder(marks: Marks) -> LineRecorder:
    """A recorder that fits this release of Python. It stops before the interpreter clears modules, at exit."""
    made = Monitor(marks) if monitoring is not None else Tracer(marks)
    atexit.register(made._stop)
    return made


def sees_all_threads() -> bool:
    """Whether it is seen what threads run that were not started by Python, such as autograd's for a GPU."""
    return monitoring is not None


# That of this process.
recorder = new_recorder(observers.marks)
observers.around_launch = recorder.paused
