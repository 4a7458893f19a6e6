"""Processes: each ends with the one that has started it, and all of a run end when the run is stopped.

Ctrl-C, SIGTERM and SIGHUP stop a run. `Stop` answers them in the process that the user has started.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds that a run has to end by itself. What it has started is killed then.
GRACE_SECONDS = 1.0
# Seconds between two looks at processes that were killed, and how many looks: one may wait for a device for ever.
SECONDS_BETWEEN_LOOKS, MOST_LOOKS = 0.01, 100
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_START = "import sys; from fourfold.candidates.process.child import start; start(*sys.argv[1:])"


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # of a system that is not Linux
        ctypes.CDLL(None).prctl(option, value)


def die_with(parent: int) -> None:
    """Let the system kill this process when its parent ends; leave at once if the parent has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become(command: Sequence[str], **variables: str) -> NoReturn:
    """Let this process run another command: signals reach it, and no process is between it and the user."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], [*command], {**os.environ, **variables})


def begin_child(parent: int) -> None:
    """Begin a process that was just forked: it dies with its parent, and signals do what they do by default."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    die_with(parent)


def adopt_orphans(adopt: bool = True) -> None:
    """From here on, what descendants of this process leave running becomes its child."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def command_of(module: str, *arguments: object) -> list[str]:
    """Return the command that calls a module's `main` in a new process, which dies with this one."""
    return [sys.executable, "-P", "-W", "ignore", "-c", _START, str(os.getpid()), module, *map(str, arguments)]


def start(parent: str, module: str, *arguments: str) -> None:
    """Run such a command. The imports of the module take seconds: the process can die before."""
    die_with(int(parent))
    del sys.argv[1:3]
    __import__(module)
    sys.modules[module].main(*arguments)


def children() -> set[int]:
    """Return the processes that are children of this one; none where the system does not tell."""
    with contextlib.suppress(OSError):
        tasks = Path("/proc/self/task").iterdir()
        return {int(number) for task in tasks for number in (task / "children").read_text().split()}
    return set()


def descendants(process: int) -> list[psutil.Process]:
    """Return each process that a process has started, and theirs, but for those that have ended."""
    found = []
    for child in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def kill_descendants() -> None:
    """Kill all that this process has started."""
    for _ in range(MOST_LOOKS):
        if not (left := descendants(os.getpid())):
            return
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(SECONDS_BETWEEN_LOOKS)


class Stop:
    """As a context, answer Ctrl-C, SIGTERM and SIGHUP in the main thread of a process that starts others.

    The first of them asks for an orderly end. What this process has started is killed after `GRACE_SECONDS`, or when
    this process ends, if that is before. Later signals are passed over: they would interrupt what ends the run.

    Args:
        relays: whether the child of `fork` is asked for the end; else this process is, by KeyboardInterrupt.

    Attributes:
        signal: the first signal; None before it.
    """

    def __init__(self, relays: bool = False) -> None:
        self.relays = relays
        self.signal: int | None = None
        self._child: int | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # no other can answer
            former = {number: signal.getsignal(number) for number in SIGNALS}
            # A signal that is ignored, as under `nohup`, stays so.
            self._former = {number: handler for number, handler in former.items() if handler is not signal.SIG_IGN}
        for number in self._former:
            signal.signal(number, self._hear)
        return self

    def __exit__(self, *raised: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            return
        self.signal = number
        adopt_orphans()
        atexit.register(self._end)
        # No thread: it could not be started where the signal has interrupted the start of another.
        signal.signal(signal.SIGALRM, lambda *_: kill_descendants())
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)
        if not self.relays:
            raise KeyboardInterrupt
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGINT)

    def _end(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # Python takes its handler away when it ends
        kill_descendants()

    @property
    def status(self) -> int:
        """The exit status of a command that the signal has ended, by the convention of shells."""
        return 128 + (self.signal or signal.SIGINT)

    def fork(self) -> int:
        """Fork, as `os.fork`. The child dies with this process, and hears signals as this process did before."""
        parent = os.getpid()
        former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process = os.fork()
            if process == 0:
                self._restore()
                die_with(parent)
            else:
                self._child = process
                if self.signal is not None:  # which came before the child
                    os.kill(process, signal.SIGKILL)
            return process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def wait(self) -> int:
        """Return the exit code of the child, once it has ended; the negative number of the signal that killed it."""
        assert self._child is not None
        code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        self._child = None
        return code
