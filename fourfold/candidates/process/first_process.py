"""The process that imports torch once and forks a process for each candidate, from its judge's side.

This module imports neither torch nor NumPy, so that the process can start while its judge still imports them.
"""

import atexit
import os
from collections.abc import Sequence
from typing import Any

from fourfold.instruments.hide_test_runner import INTERPRETER, VARIABLES
from fourfold.operations.blame import Blame
from fourfold.operations.outcomes import Kind
from fourfold.processes.child import Child
from fourfold.processes.messages import Connection, Ended, Malformed

# Seconds for the first process to import torch, and to answer.
STARTING_SECONDS = 120.0
# Variables that make no difference to a candidate: it has a folder for temporary files of its own.
INDIFFERENT = {"TMPDIR", "PYTHONDONTWRITEBYTECODE"}


class Unanswered(Exception):
    """The candidate's process did not answer a call: a failure, not a refusal."""

    fourfold_blame = Blame.BUG
    kind = Kind.CRASHED


class Crashed(Unanswered):
    """The process died."""


class FirstProcess:
    """The process that imports torch, and forks a process for each candidate."""

    def __init__(self, connection: Connection, child: Child, variables: dict[str, str]) -> None:
        self.connection, self.child, self.variables = connection, child, variables
        self.user, self.closed = os.getpid(), False

    @classmethod
    def spawn(cls) -> "FirstProcess":
        """Start one."""
        (connection, peer), environment = Connection.pair(), variables()
        with peer:
            child = Child.spawn(
                "fourfold.candidates.process.server",
                peer.fileno(),
                files=[peer.fileno()],
                environment=environment,
                plain=True,
                printed=True,
            )
        return cls(connection, child, environment)

    def ask(self, request: Any, answer: Any, files: Sequence[int] = ()) -> Any:
        """Send a request; return the answer, which is of a given type.

        Raises:
            Crashed: the process has gone.
        """
        try:
            self.connection.within(STARTING_SECONDS).send(request, files=files)
            return self.connection.receive(answer)
        except (Ended, TimeoutError, Malformed, OSError) as error:
            self.close()
            text = self.child.death.printed if self.child.death is not None else ""
            raise Crashed(f"the process that starts those of candidates has gone: {error!r}\n{text}".rstrip()) from None

    @property
    def alive(self) -> bool:
        """Return whether this process can send requests to it."""
        if self.closed or self.user != os.getpid():
            return False
        return self.user != self.child.owner or self.child.poll() is None

    def adopt(self) -> None:
        """Take it over for this process, which was forked from the one that started it.

        The parent must not use it before this process has ended. The parent ends it.
        """
        self.user = os.getpid()

    def close(self) -> None:
        """End it, and with it all candidates."""
        self.closed = True
        self.connection.close()
        if self.user == os.getpid():
            self.child.kill()


def variables() -> dict[str, str]:
    """Return the variables for a candidate's process, which shows those that it began with.

    The variables of a test run are left out: kernels must not find out that they are being tested.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith((*VARIABLES, INTERPRETER))}


_first: list[FirstProcess] = []


def first_process() -> FirstProcess:
    """Return the first process of this process; start it if necessary."""
    if not _first or not _first[0].alive:
        _first[:] = [FirstProcess.spawn()]
    return _first[0]


def first_process_of_parent() -> FirstProcess:
    """Return the first process of this process, or of the parent that this one was forked from."""
    return _first[0]


def adopt_first_process(process: FirstProcess | None = None) -> None:
    """Adopt the first process of the parent that this process was forked from, or a fork of it.

    It is left to the parent if variables that matter to candidates have changed since its start.
    """
    if process is not None:
        _first[:] = [process]
    if _first:
        differences = _first[0].variables.items() ^ variables().items()
        if {name for name, _ in differences} <= INDIFFERENT:
            _first[0].adopt()


def first_process_number() -> int | None:
    """Return the process id of the first process, or None if there is none."""
    return _first[0].child.pid if _first else None


@atexit.register
def end_first_process() -> None:
    """End the first process, and with it all candidates."""
    while _first:
        _first.pop().close()
