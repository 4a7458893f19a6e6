"""The parent of a process, its descendants and its temporary folders."""

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil

# Seconds between two checks of killed processes, and the most checks: a process may wait for a device forever.
SECONDS_BETWEEN_LOOKS, MOST_LOOKS = 0.01, 100
# The position of the address of the command line in /proc/self/stat, counted after the name of the program.
_ARG_START = 45
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(option, value)


def die_with(parent: int) -> None:
    """Ask the system to kill this process when its parent ends; exit at once if the parent has already ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans(adopt: bool = True) -> None:
    """Make processes that descendants of this one leave running its children from now on."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def show_command(words: Sequence[str]) -> None:
    """Make the system show another command line of this process, as long as the former one at most."""
    with contextlib.suppress(OSError):  # not on Linux
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, text, min(len(text), end - begin))


def children() -> set[int]:
    """Return the process ids of this process's children, or none if the system does not report them."""
    with contextlib.suppress(OSError):
        tasks = Path("/proc/self/task").iterdir()
        return {int(number) for task in tasks for number in (task / "children").read_text().split()}
    return set()


def kill_children(but: Collection[int] = ()) -> None:
    """Kill and reap this process's children except some, and the children that they leave to this process."""
    for _ in range(MOST_LOOKS):
        if not (processes := children().difference(but)):
            return
        for process in processes:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, os.WNOHANG)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def temporary_folder(prefix: str = "fourfold-") -> Path:
    """Create a folder that this process removes when it ends; processes forked from it do not."""
    folder, owner = tempfile.mkdtemp(prefix=prefix), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


def descendants(process: int) -> list[psutil.Process]:
    """Return the descendants of a process, except those that have ended."""
    result = []
    for child in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                result.append(child)
    return result


def kill_descendants(but: Collection[int] = (), of: int | None = None) -> None:
    """Kill all descendants of this process, or of another one, except some."""
    for _ in range(MOST_LOOKS):
        if not (processes := [process for process in descendants(of or os.getpid()) if process.pid not in but]):
            return
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(SECONDS_BETWEEN_LOOKS)
