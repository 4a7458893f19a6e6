"""A worker: a process with all modules imported, which forks a judge for each candidate.

It answers the driver, one candidate at a time. The worker itself imports no candidate: it limits time, memory,
processes and disk, and removes what a candidate leaves behind. So no candidate finds a trace of an earlier one.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import torch

from fourfold.candidates.process import protocol, session
from fourfold.candidates.process.child import adopt_orphans, descendants, die_with
from fourfold.candidates.process.exit_codes import spelled
from fourfold.candidates.process.protocol import printable
from fourfold.checks.records import operations
from fourfold.grading.candidates import Submission
from fourfold.grading.judging import Settings, failed, judge
from fourfold.operations.outcomes import Kind

# Seconds between two checks of a candidate's limits.
BETWEEN_LOOKS = 0.25
# The most processes of one candidate at once, and the most bytes in its folder.
MOST_PROCESSES, MOST_DISK = 64, 4 << 30
# Bytes of memory that a candidate's processes may take together beyond its limit. The system limits a single process.
BYTES_FOR_FREE = 1 << 30
# Bytes of memory that a judge may take for references, in addition to the candidate's limit.
MOST_OF_JUDGE = 12 << 30
# The number of characters of a dead judge's output.
SHOWN = 2000
# Seconds for a GPU to answer again after a candidate crashed on it, and for one attempt.
GPU_SECONDS, GPU_QUESTION = 60.0, 20.0

GONE = "the GPU does not answer"


def own_caches(folder: Path) -> dict[str, str]:
    """Return environment variables for a candidate, with caches of its own, which no other candidate has filled."""
    caches = "TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR TORCH_EXTENSIONS_DIR PYTORCH_KERNEL_CACHE_PATH"
    caches += " CUDA_CACHE_PATH FOURFOLD_CACHE XDG_CACHE_HOME"
    return {**dict.fromkeys(caches.split(), str(folder / "compiled")), "HOME": str(folder)}


@dataclass
class Judge:
    """A forked process that judges one candidate.

    Attributes:
        process: its process id.
        answers: the descriptor of its messages, a line of JSON each.
        folder: the folder of the judge and its candidate.
        said: the last stage, check and dtype that it began.
        result: the last stage, and the verdict's text.
    """

    process: int
    answers: int
    folder: Path
    said: tuple[str, str, str] = ("", "", "")
    result: tuple[str, str] | None = None
    _rest: bytes = b""

    def listen(self) -> bool:
        """Read the judge's messages; return whether more may follow."""
        part = os.read(self.answers, 1 << 20)
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            # On a GPU the candidate runs in the judge's process, and may write anything here.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                told = json.loads(line)
                if "now" in told:
                    stage, check, dtype = map(str, told["now"])
                    self.said = stage, check, dtype
                else:
                    self.result = str(told["stage"]), str(told["verdict"])
        return bool(part)


class WorkerProcess:
    """The process that answers the driver.

    Args:
        connection: to the driver.
    """

    def __init__(self, connection: protocol.Connection) -> None:
        self.connection = connection
        torch.set_num_threads(1)
        # Do not try cases that failed one candidate first on the next one: the seed decides.
        hypothesis.settings.register_profile("grading", database=None, derandomize=False)
        hypothesis.settings.load_profile("grading")
        operations()
        importlib.import_module("sympy")  # the first backward pass imports it
        gc.collect()
        gc.freeze()
        self.own = os.getpid()

    def run(self) -> None:
        """Judge candidates until the driver has gone."""
        with contextlib.suppress(protocol.Ended):
            while True:
                job, _, _ = self.connection.receive()
                self.connection.send(self._answer(job), {})

    def _answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return the verdict on a candidate, or why there is none, which says nothing of the candidate."""
        candidate, settings = Submission(**job["candidate"]), Settings.of(job["settings"])
        if settings.device == "cpu":
            session.first_process()
        started = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="candidate-"))
        begun = self._fork(candidate, settings, job["seed"], folder, job["gpu"])
        try:
            ended = self._watched(begun, candidate, settings, started)
        finally:
            os.close(begun.answers)
            self._clear(begun)
        answer: dict[str, Any] = {"where": f"{socket.gethostname()} {self.own}", "seconds": time.monotonic() - started}
        if begun.result is not None:
            stage, text = begun.result
            return {**answer, "stage": stage, "verdict": text}
        kind, message, whose = ended
        stage, check, dtype = begun.said
        at = f", in the check {check}, {dtype}" if check else ""
        if settings.device == "cuda" and not gpu_answers():
            answer["gone"] = GONE
        if not whose:
            return {**answer, "lost": f"{message}{at}"}
        verdict = failed(candidate, settings.device, job["seed"], kind, f"{message}{at}")
        return {**answer, "stage": stage, "verdict": verdict.json()}

    # ---- the fork

    def _fork(self, candidate: Submission, settings: Settings, seed: int, folder: Path, gpu: str) -> Judge:
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(read)
            self._become_judge(candidate, settings, seed, folder, gpu, write)
        os.close(write)
        return Judge(process, read, folder)

    def _become_judge(
        self, candidate: Submission, settings: Settings, seed: int, folder: Path, gpu: str, write: int
    ) -> None:
        """Judge in this freshly forked process, then exit it."""
        code = 1
        try:
            os.setsid()
            die_with(self.own)
            self.connection.close()
            resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_DISK, MOST_DISK))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            printed = os.open(folder / "printed-by-judge", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for descriptor in (1, 2):
                os.dup2(printed, descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
            if settings.device == "cuda":
                os.environ.update(own_caches(folder))
            else:
                session.first_process_of_parent().adopt()
            with os.fdopen(write, "w") as answers:

                def say(**said: Any) -> None:
                    answers.write(json.dumps(said) + "\n")
                    answers.flush()

                def now(stage: str, check: str, dtype: str) -> None:
                    say(now=[stage, check, dtype])

                own = folder / "judged"
                own.mkdir()
                stage, verdict = judge(candidate, settings, seed, own, now, gpu)
                session.end_candidates()
                say(stage=stage, verdict=verdict.json())
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    # ---- the watch

    def _watched(
        self, begun: Judge, candidate: Submission, settings: Settings, started: float
    ) -> tuple[Kind, str, bool]:
        """Wait for the judge to end; return what to report if it left no verdict.

        Returns:
            the kind, the message, and whether it is the candidate's own doing.
        """
        trusted = settings.device == "cuda"
        driver, looked = self.connection.end, started
        while True:
            ready, _, _ = select.select([begun.answers, driver.fileno()], [], [], BETWEEN_LOOKS)
            if driver.fileno() in ready:  # it sends nothing while it waits, so it has gone
                os.kill(begun.process, signal.SIGKILL)
                raise protocol.Ended
            if begun.answers in ready and not begun.listen():
                _, status = os.waitpid(begun.process, 0)
                break
            if time.monotonic() - started > candidate.seconds:
                self._end(begun)
                return Kind.TIMED_OUT, f"timed out: it was not judged within {candidate.seconds:g} s", True
            if time.monotonic() - looked < BETWEEN_LOOKS:
                continue
            looked = time.monotonic()
            if too_much := self._too_much(begun, candidate, trusted):
                self._end(begun)
                return Kind.CRASHED, too_much, True
        code = os.waitstatus_to_exitcode(status)
        message = "\n".join(filter(None, (f"the process that judges it {spelled(code)}", _printed(begun.folder))))
        # A fault of the harness is no verdict on a candidate. On a GPU, both share one process.
        return Kind.CRASHED, f"crashed: {message}", trusted and code != 1 and code != -signal.SIGKILL

    def _too_much(self, begun: Judge, candidate: Submission, trusted: bool) -> str | None:
        """Return which limit the candidate exceeds, or None."""
        judging = {begun.process, session.first_process_number()}
        others = [child for child in descendants(self.own) if child.pid not in judging]
        if len(others) > MOST_PROCESSES:
            return f"crashed: it has started {len(others)} processes, and may have {MOST_PROCESSES}"
        taken = sum(map(_bytes_of, others))
        if taken > candidate.bytes + BYTES_FOR_FREE:
            return f"crashed: its processes take {taken} bytes of memory, and may take {candidate.bytes}"
        of_judge = _bytes_of(psutil.Process(begun.process))
        if of_judge > MOST_OF_JUDGE + candidate.bytes * trusted:
            return f"crashed: the process that judges it takes {of_judge} bytes of memory"
        disk = sum(_sizes(begun.folder))
        if disk > MOST_DISK:
            return f"crashed: its files take {disk} bytes, and may take {MOST_DISK}"
        return None

    def _end(self, begun: Judge) -> None:
        """Kill a running judge."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(begun.process, signal.SIGKILL)
            os.kill(begun.process, signal.SIGKILL)
        os.waitpid(begun.process, 0)
        while begun.listen():
            pass
        # The judge may have died in the middle of a message to the process that forks candidates.
        session.end_all()

    def _reap(self, first: int | None) -> None:
        """Reap ended children: a candidate's processes whose parents ended before them."""
        for child in psutil.Process().children():
            if child.pid != first:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)

    def _clear(self, begun: Judge) -> None:
        """Remove the processes and files that a candidate left."""
        first = session.first_process_number()
        if first is not None and not session.first_process_of_parent().alive:
            session.end_all()
            first = None
        while left := [child for child in descendants(self.own) if child.pid != first]:
            for child in left:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            psutil.wait_procs(left, timeout=1)
        self._reap(first)
        shutil.rmtree(begun.folder, ignore_errors=True)


# ---- the GPU


def gpu_answers(seconds: float = GPU_SECONDS) -> bool:
    """Return whether a kernel gives the right result on the GPU within some seconds after a crash."""
    deadline = time.monotonic() + seconds
    while True:
        process = os.fork()
        if process == 0:
            os._exit(_sums())
        if _exit_code(process, GPU_QUESTION) == 0:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(1)


def _sums() -> int:
    try:
        return int(torch.ones(1024, device="cuda").sum().item() != 1024)
    except BaseException:
        return 1


def _exit_code(process: int, seconds: float) -> int | None:
    """Return a child's exit code, or None if it had to be killed after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _bytes_of(process: psutil.Process) -> int:
    """Return a process's memory in bytes; shared memory counts in proportion."""
    with contextlib.suppress(psutil.Error):
        return process.memory_full_info().pss
    return 0


def _sizes(folder: Path) -> Iterator[int]:
    """Yield the bytes on disk of each file in a folder."""
    for inside, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(inside, name)).st_blocks * 512


def _printed(folder: Path) -> str:
    with contextlib.suppress(OSError), (folder / "printed-by-judge").open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - SHOWN))
        return printable(file.read(SHOWN).decode(errors="replace")).strip()
    return ""


def main(descriptor: str, device: str, folder: str) -> None:
    """Serve the driver until it closes the connection, with `folder` for temporary files."""
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    adopt_orphans()  # processes that a candidate leaves behind become children of this process
    connection = protocol.Connection(socket.socket(fileno=int(descriptor)))
    try:
        worker = WorkerProcess(connection)
        ready: dict[str, Any] = {"where": f"{socket.gethostname()} {os.getpid()}"}
        if device == "cuda" and not gpu_answers():
            ready["gone"] = GONE
        connection.send(ready, {})
        worker.run()
    finally:
        session.end_all()
        shutil.rmtree(folder, ignore_errors=True)
