"""A child process: forked or spawned, limited, tied to its parent, with the cause of its death as data.

Every process that runs a kernel is a `Child`. This module alone forks.
"""

import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import fourfold
from fourfold.compat.python_internals import handle_exit
from fourfold.processes.family import die_with

# The signals that stop a run.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The number of characters of a dead process's output.
SHOWN_CHARACTERS = 2000
# Seconds between two looks at a process: at first, and at most.
LEAST_PAUSE, MOST_PAUSE = 0.001, 0.02
_exit = os._exit  # saved before a candidate, which may replace it, is loaded
# The programs that call `start`: with the arguments of a command line, or without a trace there.
_START = "import sys; from fourfold.processes.child import start; start(*sys.argv[1:])"
_PLAIN_START = """__import__("sys").path[:1] = [{package!r}]
__import__("fourfold.processes.child").processes.child.start(*{given!r})
"""


@dataclass(frozen=True)
class Death:
    """The end of a process.

    Attributes:
        code: its exit code, or the negative number of the signal that killed it; None if it is unknown.
        printed: the end of its output, if it was kept.
    """

    code: int | None
    printed: str = ""

    @property
    def cause(self) -> str:
        """Return the cause in words, as "died of SIGSEGV"."""
        if self.code is None:
            return "ended"
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        memory = ", as where memory runs out" if self.code == -signal.SIGKILL else ""
        return f"died of {signal.Signals(-self.code).name}{memory}"

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.cause, self.printed)))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that the system sets to a child and to each process that it starts. None leaves the parent's limit.

    Attributes:
        memory: bytes of a process's own memory.
        file: bytes of a file that it writes.
        processor: seconds of processor time.
    """

    memory: int | None = None
    file: int | None = None
    processor: int | None = None

    def apply(self) -> None:
        """Limit this process."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for kind, limit in ((resource.RLIMIT_DATA, self.memory), (resource.RLIMIT_FSIZE, self.file)):
            if limit is not None:
                resource.setrlimit(kind, (limit, limit))
        if self.processor is not None:
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (self.processor if hard < 0 else min(self.processor, hard), hard))


class Child:
    """A process that this one started, and that ends with it.

    Only the process that started it can wait for it. A process forked from that one can kill it.

    Attributes:
        pid: its process id.
        death: its end; None while it runs, as far as this process knows.
    """

    def __init__(
        self,
        pid: int,
        *,
        session: bool,
        output: IO[bytes] | None,
        clock: Callable[[], float] = time.monotonic,
        popen: subprocess.Popen | None = None,
    ) -> None:
        self.pid, self.owner, self.death = pid, os.getpid(), None if pid else Death(None)
        self._session, self._output, self._clock, self._popen = session, output, clock, popen
        self._lock = threading.Lock()

    @classmethod
    def fork(
        cls,
        work: Callable[[], object],
        *,
        session: bool = True,
        quiet: bool = False,
        printed: bool = False,
        limits: Limits | None = None,
        handlers: Mapping[Any, Any] | None = None,
        handles_exit: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> "Child":
        """Fork a process that does some work and exits.

        Args:
            work: called in the child. An integer that it returns is the exit code. An exception is printed; the exit
                code is 1.
            session: whether the child leads a session of its own, so that `kill` ends all processes that it started,
                and Ctrl-C does not reach it.
            quiet: whether to discard its output.
            printed: whether to keep its output for `Death`.
            limits: the limits of its resources.
            handlers: its handlers of `SIGNALS`, by number; otherwise signals have their default effect. Ignored
                signals, as under `nohup`, stay ignored.
            handles_exit: whether it waits for its threads and runs the exit handlers, also the parent's, at its end.
            clock: the clock for `wait`, in seconds.
        """
        output = tempfile.TemporaryFile() if printed else None  # noqa: SIM115 - as long as the process
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of other threads
                pid = os.fork()
            if pid:
                return cls(pid, session=session, output=output, clock=clock)
            try:
                for number in SIGNALS:
                    if signal.getsignal(number) is not signal.SIG_IGN:
                        signal.signal(number, (handlers or {}).get(number, signal.SIG_DFL))
                die_with(parent)
                if session:
                    os.setsid()
                if output is not None or quiet:
                    _redirect(os.open(os.devnull, os.O_WRONLY) if output is None else output.fileno())
                if limits is not None:
                    limits.apply()
            except BaseException:
                os._exit(1)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        return end_with(work, handles_exit)

    @classmethod
    def spawn(
        cls,
        module: str,
        *arguments: object,
        files: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        plain: bool = False,
        printed: bool = False,
    ) -> "Child":
        """Start a new Python process with a session of its own, which calls a module's `main` and exits as that says.

        Args:
            module: the name of the module.
            *arguments: of `main`, as text.
            files: descriptors that the process inherits.
            environment: its variables; this process's by default.
            plain: whether its command line and its variables show nothing of this package: it is a program that Python
                reads from a pipe. Otherwise PYTHONPATH is extended to find this package.
            printed: whether to keep its output for `Death`.
        """
        output = tempfile.TemporaryFile() if printed else None  # noqa: SIM115 - as long as the process
        words = [str(os.getpid()), module, *map(str, arguments)]
        variables = dict(os.environ if environment is None else environment)
        if not plain:
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, (_PACKAGE, variables.get("PYTHONPATH"))))
        popen = subprocess.Popen(
            [sys.executable, "-"] if plain else [sys.executable, "-P", "-W", "ignore", "-c", _START, *words],
            pass_fds=files,
            stdin=subprocess.PIPE if plain else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=variables,
            start_new_session=True,
        )
        if popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError), popen.stdin as program:
                program.write(_PLAIN_START.format(package=_PACKAGE, given=words).encode())
        return cls(popen.pid, session=True, output=output, popen=popen)

    def poll(self) -> Death | None:
        """Return its end, or None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self, seconds: float = math.inf) -> Death | None:
        """Wait for its end for some seconds; return it, or None if it still runs."""
        if seconds == math.inf:
            return self._reap(0)
        deadline, pause = self._clock() + seconds, LEAST_PAUSE
        while (death := self.poll()) is None and self._clock() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE)
        return death

    def interrupt(self) -> None:
        """Send it SIGINT."""
        if self.death is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGINT)

    def kill(self) -> Death | None:
        """Kill it and the processes of its session; return its end, or None in a process forked from its parent."""
        if self._session:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        if self.death is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # before it leads its session
        return self.wait() if self.owner == os.getpid() else None

    def _reap(self, options: int) -> Death | None:
        with self._lock:
            if self.death is None:
                code = None
                with contextlib.suppress(ChildProcessError):  # another thread has waited for all children
                    pid, status = os.waitpid(self.pid, options)
                    if not pid:
                        return None
                    code = os.waitstatus_to_exitcode(status)
                self.death = Death(code, self._read_output())
                if self._popen is not None:
                    self._popen.returncode = code or 0
            return self.death

    def _read_output(self) -> str:
        if self._output is None:
            return ""
        with self._output as file:
            size = os.fstat(file.fileno()).st_size
            output = os.pread(file.fileno(), SHOWN_CHARACTERS, max(0, size - SHOWN_CHARACTERS))
        return printable(output.decode(errors="replace")).strip()


def _redirect(descriptor: int) -> None:
    """Send the output of this process to a file."""
    for standard in (1, 2):
        os.dup2(descriptor, standard)


def end_with(work: Callable[[], object], handles_exit: bool = True) -> NoReturn:
    """Do some work as the last of this process, and end the process without finalizing Python.

    With torch loaded, finalizing takes up to two seconds.

    Args:
        work: returns the exit code, if it is an integer. An exception is printed; the exit code is 1.
        handles_exit: whether to wait for threads and to run exit handlers before the end.
    """
    code = 1
    try:
        result = work()
        code = result if isinstance(result, int) else 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        if handles_exit:
            with contextlib.suppress(BaseException):
                handle_exit()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        _exit(code)


_PACKAGE = str(Path(fourfold.__file__).resolve().parents[1])


def start(parent: str, module: str, *arguments: str) -> None:
    """Run the command of `Child.spawn`: tie this process to its parent before the imports, which take seconds."""
    die_with(int(parent))
    del sys.argv[1:3]
    __import__(module)
    sys.exit(sys.modules[module].main(*arguments))


def become(command: Sequence[str], **variables: str) -> NoReturn:
    """Replace this process by another command: signals reach it, and no process is between it and the user."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], [*command], {**os.environ, **variables})


def printable(text: str) -> str:
    """Replace characters that could control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
