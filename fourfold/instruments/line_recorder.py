"""A recorder of the lines that ran in an implementation's files.

During calls of an implementation, the recorder watches its Python code: by `sys.monitoring` if Python has it, or else
by a trace function. Both are too slow for the code that Triton's interpreter makes of a kernel. So a kernel's source
gets marks: see `fourfold.backends.triton.interpreter.marks`.
"""

import atexit
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

from fourfold.backends import observers
from fourfold.backends.observers import Marks
from fourfold.operations.blame import Blame, blame_of, recorded_blame
from fourfold.operations.not_reached import NotReached

# From Python 3.12 on.
monitoring: Any = getattr(sys, "monitoring", None)
# Tool ids of `sys.monitoring` that are free unless another tool took them first. The other ids have predefined uses.
_TOOLS = (3, 4, 1, 2)
_ABSENT: Any = object()


class LineRecorder:
    """The executed lines of the watched files.

    Attributes:
        blind: whether it missed calls because something else traces the program.
        users: the number of users that still need it.
    """

    def __init__(self, marks: Marks) -> None:
        self.blind, self.users = False, 0
        self._marks = marks
        # By file: each line of a statement with the statement's first line; and the first lines of executed statements.
        self._statements: dict[str, dict[int, int]] = {}
        self._hits: dict[str, set[int]] = {}
        # From the file name in code objects to the file's real name, or None if it is not watched.
        self._files: dict[str, str | None] = {}

    def watch(self, statements: Mapping[str, Mapping[int, int]]) -> None:
        """Watch more files.

        Args:
            statements: by a file's real name, each line of a statement with the statement's first line.
        """
        for file, lines in statements.items():
            self._hits.setdefault(file, set())
            statements_of_file = self._statements.setdefault(file, {})
            if not lines.keys() <= statements_of_file.keys():
                statements_of_file.update(lines)
                self._files = {}
                self._more()

    def lines(self) -> dict[str, set[int]]:
        """Return the first line of each executed statement, by file."""
        return {file: hits | self._marks.lines(file) for file, hits in self._hits.items()}

    def forget(self, lines: Mapping[str, Iterable[int]]) -> None:
        """Count statements in Python as not executed until they run again.

        Args:
            lines: the first lines of the statements, by file.
        """
        for file, firsts in lines.items():
            self._hits[file].difference_update(firsts)
        self._more()

    def _file(self, name: str) -> str | None:
        """Return the real name of a watched file, or None."""
        file = self._files.get(name, _ABSENT)
        if file is _ABSENT:
            real = os.path.realpath(name)
            file = self._files[name] = real if real in self._statements else None
        return file

    def _more(self) -> None:
        """Handle newly watched files, and statements that count as not executed again."""

    def begin(self) -> bool:
        """Start recording a call of an implementation in this thread; return the argument for `end`."""
        return False

    def end(self, token: bool) -> None:
        """Stop recording: the implementation has returned or raised."""

    @contextlib.contextmanager
    def record_call(self) -> Iterator[None]:
        """Record a call of an implementation. The lines of a call that cannot be judged do not count as executed."""
        marks, former_hits = dict(self._marks.ran), {file: set(lines) for file, lines in self._hits.items()}
        token = self.begin()
        try:
            yield
        except BaseException as error:
            if isinstance(error, NotReached) or (recorded_blame(error) or blame_of(error)) is Blame.LACK:
                for number in self._marks.ran.keys() - marks.keys():
                    del self._marks.ran[number]
                self.forget({file: lines - former_hits.get(file, set()) for file, lines in self._hits.items()})
            raise
        finally:
            self.end(token)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Pause recording in this thread, which runs no Python code of an implementation inside the block."""
        yield

    def close(self) -> None:
        """Stop watching, unless there are users left."""
        if not self.users:
            self._statements, self._files = {}, {}
            self._stop()

    def _stop(self) -> None:
        """Release the resources of watching."""


class Tracer(LineRecorder):
    """A recorder with a trace function during calls. It does nothing if there is a trace function already."""

    def __init__(self, marks: Marks) -> None:
        super().__init__(marks)
        self._trace = self._on_call  # one object, so that `is` recognizes it
        # The trace function of each function, by its file, first line and name; None if all its lines have run.
        self._functions: dict[tuple[str, int, str], Callable[..., Any] | None] = {}
        self._remaining: dict[str, set[int]] = {}
        self._in_parts = set[tuple[str, int, str]]()  # the functions whose lines have parts

    def _more(self) -> None:
        self._functions = {}
        self._remaining = {
            file: set(lines.values()) - self._hits[file] - self._marks.lines(file)
            for file, lines in self._statements.items()
        }

    def begin(self) -> bool:
        """Trace this thread."""
        if not any(self._remaining.values()):
            return False
        former = sys.gettrace()
        if former is not None:
            self.blind |= former is not self._trace
            return False
        sys.settrace(self._trace)
        return True

    def end(self, token: bool) -> None:
        """Stop tracing. A trace function that the implementation has installed stays."""
        if token and sys.gettrace() is self._trace:
            sys.settrace(None)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Trace nothing inside the block."""
        if sys.gettrace() is not self._trace:
            yield
            return
        sys.settrace(None)
        try:
            yield
        finally:
            if sys.gettrace() is None:
                sys.settrace(self._trace)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
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
            trace = self._functions[key] = self._function_tracer(file, code)
        frame.f_trace_opcodes = trace is not None and key in self._in_parts
        return trace

    def _function_tracer(self, file: str, code: CodeType) -> Callable[..., Any] | None:
        """Return a function's trace function, which ends when all statements of the function have run."""
        statements, hits, left_in_file = self._statements[file], self._hits[file], self._remaining[file]
        lines = (line for _, _, line in code.co_lines() if line is not None)
        parts = observers.parts_of_code(file, code)
        of_code = {*lines, *itertools.chain.from_iterable(parts.values())}
        remaining = {statements[line] for line in of_code if line in statements} - hits
        key = file, code.co_firstlineno, code.co_name
        if parts:
            self._in_parts.add(key)

        def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
            lines_reached = (
                (frame.f_lineno,) if event == "line" else parts.get(frame.f_lasti, ()) if event == "opcode" else ()
            )
            firsts = [first for line in lines_reached if (first := statements.get(line)) in remaining]
            for first in firsts:
                hits.add(first)
                remaining.discard(first)
                left_in_file.discard(first)
                if not remaining:
                    self._functions[key] = None
                    return None
            return trace

        return trace if remaining else None

    def _stop(self) -> None:
        self._remaining = {}


class Monitor(LineRecorder):
    """A recorder with `sys.monitoring`: each line reports once. It does nothing if all tools are taken."""

    def __init__(self, marks: Marks) -> None:
        super().__init__(marks)
        self._tool: int | None = None
        self._code: list[CodeType] = []
        self._parts: dict[CodeType, dict[int, tuple[int, ...]]] = {}

    def _more(self) -> None:
        if self._tool is None:
            free = (tool for tool in _TOOLS if monitoring.get_tool(tool) is None)
            self._tool = next(free, None)
            if self._tool is None:
                self.blind = True
                return
            monitoring.use_tool_id(self._tool, "fourfold")
            monitoring.register_callback(self._tool, monitoring.events.PY_START, self._on_start)
            monitoring.register_callback(self._tool, monitoring.events.LINE, self._on_line)
            monitoring.register_callback(self._tool, monitoring.events.INSTRUCTION, self._on_instruction)
            monitoring.set_events(self._tool, monitoring.events.PY_START)
        monitoring.restart_events()  # running functions may belong to the new files

    def _on_start(self, code: CodeType, offset: int) -> Any:
        """Enable line events for a function of an implementation when it is first called."""
        if self._file(code.co_filename) is not None and self._tool is not None:
            self._code.append(code)
            monitoring.set_local_events(self._tool, code, monitoring.events.LINE | monitoring.events.INSTRUCTION)
        return monitoring.DISABLE

    def _on_line(self, code: CodeType, line: int) -> Any:
        """Record a line when it is first reached."""
        file = self._file(code.co_filename)
        first = None if file is None else self._statements[file].get(line)
        if file is not None and first is not None:
            self._hits[file].add(first)
        return monitoring.DISABLE

    def _on_instruction(self, code: CodeType, offset: int) -> Any:
        """Record the parts of a line when one of their instructions is first reached."""
        file = self._file(code.co_filename)
        if file is not None:
            if code not in self._parts:
                self._parts[code] = observers.parts_of_code(file, code)
            self._hits[file].update(
                part for part in self._parts[code].get(offset, ()) if part in self._statements[file]
            )
        return monitoring.DISABLE

    def _stop(self) -> None:
        """Free the tool."""
        if self._tool is None:
            return
        for code in self._code:
            monitoring.set_local_events(self._tool, code, monitoring.events.NO_EVENTS)
        monitoring.set_events(self._tool, monitoring.events.NO_EVENTS)
        for event in (monitoring.events.PY_START, monitoring.events.LINE, monitoring.events.INSTRUCTION):
            monitoring.register_callback(self._tool, event, None)
        monitoring.free_tool_id(self._tool)
        self._tool, self._code, self._parts = None, [], {}


def new_recorder(marks: Marks) -> LineRecorder:
    """Return a recorder for this release of Python. It stops at exit, before the interpreter clears modules."""
    recorder = Monitor(marks) if monitoring is not None else Tracer(marks)
    atexit.register(recorder._stop)
    return recorder


def sees_all_threads() -> bool:
    """Return whether recording covers threads that Python did not start, such as autograd's for a GPU."""
    return monitoring is not None


# The recorder of this process.
recorder = new_recorder(observers.marks)
observers.around_launch = recorder.pause
