"""Child processes that end with their parent, and all end when the run is stopped.

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
# Seconds that a run has to end by itself before its descendants are killed.
GRACE_SECONDS = 1.0
# Seconds between two checks of killed processes, and the most checks: a process may wait for a device forever.
SECONDS_BETWEEN_LOOKS, MOST_LOOKS = 0.01, 100
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_START = "import sys; from fourfold.candidates.process.child import start; start(*sys.argv[1:])"


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(option, value)


def die_with(parent: int) -> None:
    """Ask the system to kill this process when its parent ends; exit at once if the parent has already ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become(command: Sequence[str], **variables: str) -> NoReturn:
    """Replace this process by another command: signals reach it, and no process is between it and the user."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], [*command], {**os.environ, **variables})


def begin_child(parent: int) -> None:
    """Set up a freshly forked process: it dies with its parent, and signals have their default effect."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    die_with(parent)


def adopt_orphans(adopt: bool = True) -> None:
    """Make processes that descendants of this one leave running its children from now on."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def command_of(module: str, *arguments: object) -> list[str]:
    """Return the command that calls a module's `main` in a new process, which dies with this one."""
    return [sys.executable, "-P", "-W", "ignore", "-c", _START, str(os.getpid()), module, *map(str, arguments)]


def start(parent: str, module: str, *arguments: str) -> None:
    """Run the command of `command_of`: tie this process to its parent before the imports, which take seconds."""
    die_with(int(parent))
    del sys.argv[1:3]
    __import__(module)
    sys.modules[module].main(*arguments)


def children() -> set[int]:
    """Return the process ids of this process's children, or none if the system does not report them."""
    with contextlib.suppress(OSError):
        tasks = Path("/proc/self/task").iterdir()
        return {int(number) for task in tasks for number in (task / "children").read_text().split()}
    return set()


def descendants(process: int) -> list[psutil.Process]:
    """Return the descendants of a process, except those that have ended."""
    found = []
    for child in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def kill_descendants() -> None:
    """Kill all descendants of this process."""
    for _ in range(MOST_LOOKS):
        if not (left := descendants(os.getpid())):
            return
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(SECONDS_BETWEEN_LOOKS)


class Stop:
    """A context that answers Ctrl-C, SIGTERM and SIGHUP in the main thread of a process that starts others.

    The first signal requests an orderly end. The descendants of this process are killed after `GRACE_SECONDS`, or when
    this process ends, if that is earlier. Later signals are ignored: they would interrupt the end of the run.

    Args:
        relays: whether to interrupt the child of `fork` instead of raising KeyboardInterrupt in this process.

    Attributes:
        signal: the first signal; None before it.
    """

    def __init__(self, relays: bool = False) -> None:
        self.relays = relays
        self.signal: int | None = None
        self._child: int | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # other threads cannot handle signals
            former = {number: signal.getsignal(number) for number in SIGNALS}
            # A signal that is ignored, as under `nohup`, stays ignored.
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
        # A timer instead of a thread, which could not start if the signal interrupted the start of another thread.
        signal.signal(signal.SIGALRM, lambda *_: kill_descendants())
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)
        if not self.relays:
            raise KeyboardInterrupt
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGINT)

    def _end(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # Python removes the handler at exit
        kill_descendants()

    @property
    def status(self) -> int:
        """Return the exit status of a command that the signal ended, by the convention of shells."""
        return 128 + (self.signal or signal.SIGINT)

    def fork(self) -> int:
        """Fork, as `os.fork`. The child dies with this process, and handles signals as this process did before."""
        parent = os.getpid()
        former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process = os.fork()
            if process == 0:
                self._restore()
                die_with(parent)
            else:
                self._child = process
                if self.signal is not None:  # the signal came before the child
                    os.kill(process, signal.SIGKILL)
            return process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def wait(self) -> int:
        """Wait for the child; return its exit code, or the negative number of the signal that killed it."""
        assert self._child is not None
        code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        self._child = None
        return code
