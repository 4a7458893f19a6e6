"""A worker: a process with all modules imported, which forks a judge for each candidate.

It answers the driver, one candidate at a time. The worker itself imports no candidate: it limits time, memory,
processes and disk, and removes what a candidate leaves behind. So no candidate finds a trace of an earlier one.
"""

import contextlib
import functools
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis
import psutil
import torch

from fourfold.candidates.process import first_process, session
from fourfold.checks.records import operations
from fourfold.grading.candidates import Submission
from fourfold.grading.judging import failure_verdict, judge
from fourfold.grading.messages import CheckBegun, Job, Judged, Reply
from fourfold.operations.outcomes import Kind
from fourfold.processes.child import Child, Death, Limits
from fourfold.processes.family import adopt_orphans, descendants, kill_children, kill_descendants
from fourfold.processes.messages import Connection, Ended, Malformed

# Seconds between two checks of a candidate's limits.
BETWEEN_LOOKS = 0.25
# The most processes of one candidate at once, and the most bytes in its folder.
MOST_PROCESSES, MOST_DISK = 64, 4 << 30
# Bytes of memory that a candidate's processes may take together beyond its limit. The system limits a single process.
BYTES_FOR_FREE = 1 << 30
# Bytes of memory that a judge may take for references, in addition to the candidate's limit.
MOST_OF_JUDGE = 12 << 30
# Seconds for a judge to send a message that it began, and to end after it closed its connection.
SECONDS_TO_END = 5.0
# Seconds for a GPU to answer again after a candidate crashed on it, and for one attempt.
GPU_SECONDS, GPU_QUESTION = 60.0, 20.0

GONE = "the GPU does not answer"


def own_caches(folder: Path) -> dict[str, str]:
    """Return environment variables for a candidate, with caches of its own, which no other candidate has filled."""
    caches = "TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR TORCH_EXTENSIONS_DIR PYTORCH_KERNEL_CACHE_PATH"
    caches += " CUDA_CACHE_PATH FOURFOLD_CACHE XDG_CACHE_HOME"
    return {**dict.fromkeys(caches.split(), str(folder / "compiled")), "HOME": str(folder)}


class Judge:
    """A process that judges one candidate.

    Attributes:
        child: the process.
        connection: to it.
        folder: the folder of the judge and its candidate.
        stage: the last check that it began.
        result: the verdict.
    """

    def __init__(self, child: Child, connection: Connection, folder: Path) -> None:
        self.child, self.connection, self.folder = child, connection, folder
        self.stage = CheckBegun("", "", "")
        self.result: Judged | None = None

    def listen(self) -> bool:
        """Read a message; return whether more may follow."""
        # On a GPU the candidate runs in the judge's process, and may write anything here.
        with contextlib.suppress(Ended, Malformed, OSError):
            message = self.connection.within(SECONDS_TO_END).receive(CheckBegun | Judged)
            if isinstance(message, Judged):
                self.result = message
            else:
                self.stage = message
            return True
        return False

    def end(self) -> Death:
        """Kill the judge if it still runs, and read its last messages."""
        death = self.child.kill()
        assert death is not None
        while self.listen():
            pass
        return death


class WorkerProcess:
    """The process that answers the driver.

    Args:
        connection: to the driver.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        torch.set_num_threads(1)
        # Do not try cases that failed one candidate first on the next one: the seed decides.
        hypothesis.settings.register_profile("grading", database=None, derandomize=False)
        hypothesis.settings.load_profile("grading")
        operations()
        importlib.import_module("sympy")  # the first backward pass imports it
        gc.collect()
        gc.freeze()
        self.pid = os.getpid()

    def run(self) -> None:
        """Judge candidates until the driver has gone."""
        with contextlib.suppress(Ended):
            while True:
                self.connection.send(self._answer(self.connection.receive(Job)))

    def _answer(self, job: Job) -> Reply:
        """Return the verdict on a candidate, or why there is none, which says nothing about the candidate."""
        if job.settings.device == "cpu":
            first_process.first_process()
        start = time.monotonic()
        folder = Path(tempfile.mkdtemp())
        end, peer = Connection.pair()
        with end:
            with peer:
                # On the CPU the judge runs no code of the candidate, and makes files of many addresses.
                limits = Limits(file=MOST_DISK if job.settings.device == "cuda" else None)
                child = Child.fork(functools.partial(self._judge, job, folder, end, peer), printed=True, limits=limits)
            judge = Judge(child, end, folder)
            try:
                reason = self._wait_for(judge, job, start)
            finally:
                self._clear(judge)
        reply = Reply(worker=f"{socket.gethostname()} {self.pid}", seconds=time.monotonic() - start)
        if judge.result is not None:
            return replace(reply, stage=judge.result.stage, verdict=judge.result.verdict)
        kind, message, is_verdict = reason
        stage = judge.stage
        place = f", in the check {stage.check}, {stage.dtype}" if stage.check else ""
        if job.settings.device == "cuda" and not gpu_answers():
            reply = replace(reply, end_reason=GONE)
        if not is_verdict:
            return replace(reply, loss_reason=f"{message}{place}")
        verdict = failure_verdict(job.candidate, job.settings.device, job.seed, kind, f"{message}{place}")
        return replace(reply, stage=stage.stage, verdict=verdict.json())

    def _judge(self, job: Job, folder: Path, worker: Connection, answers: Connection) -> None:
        """Judge a candidate in a freshly forked process."""
        self.connection.close()
        worker.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        if job.settings.device == "cuda":
            os.environ.update(own_caches(folder))
        else:
            first_process.adopt_first_process()

        def begin(stage: str, check: str, dtype: str) -> None:
            answers.send(CheckBegun(stage, check, dtype))

        kernels, current = folder / "kernels", folder / "current"
        for each in (kernels, current):
            each.mkdir()
        os.chdir(session.copy_folder(current))  # the next candidate does not find the files that this one leaves
        stage, verdict = judge(job.candidate, job.settings, job.seed, kernels, begin, job.gpu)
        session.end_candidates()
        answers.send(Judged(stage, verdict.json()))

    # ---- the watch

    def _wait_for(self, judge: Judge, job: Job, start: float) -> tuple[Kind, str, bool]:
        """Wait for the judge to end; return what to report if it left no verdict.

        Returns:
            the kind, the message, and whether it is the candidate's own doing.
        """
        candidate, trusted = job.candidate, job.settings.device == "cuda"
        last_look = start
        while True:
            ready, _, _ = select.select([judge.connection, self.connection], [], [], BETWEEN_LOOKS)
            if self.connection in ready:  # the driver sends nothing while it waits, so it has gone
                raise Ended
            if judge.connection in ready and not judge.listen():
                break
            if time.monotonic() - start > candidate.seconds:
                self._end(judge)
                return Kind.TIMED_OUT, f"timed out: it was not judged within {candidate.seconds:g} s", True
            if time.monotonic() - last_look < BETWEEN_LOOKS:
                continue
            last_look = time.monotonic()
            if too_much := self._too_much(judge, candidate, trusted):
                self._end(judge)
                return Kind.CRASHED, too_much, True
        death = judge.child.wait(SECONDS_TO_END) or judge.end()
        # A fault of the harness is no verdict on a candidate. On a GPU, both share one process.
        is_own_fault = trusted and death.code not in (1, -signal.SIGKILL)
        return Kind.CRASHED, f"crashed: the process that judges it {death}", is_own_fault

    def _too_much(self, judge: Judge, candidate: Submission, trusted: bool) -> str | None:
        """Return which limit the candidate exceeds, or None."""
        judging = {judge.child.pid, first_process.first_process_number()}
        processes = [child for child in descendants(self.pid) if child.pid not in judging]
        if len(processes) > MOST_PROCESSES:
            return f"crashed: it has started {len(processes)} processes, and may have {MOST_PROCESSES}"
        total = sum(map(_bytes_of, processes))
        if total > candidate.bytes + BYTES_FOR_FREE:
            return f"crashed: its processes take {total} bytes of memory, and may take {candidate.bytes}"
        of_judge = _bytes_of(psutil.Process(judge.child.pid))
        if of_judge > MOST_OF_JUDGE + candidate.bytes * trusted:
            return f"crashed: the process that judges it takes {of_judge} bytes of memory"
        disk = sum(_sizes(judge.folder))
        if disk > MOST_DISK:
            return f"crashed: its files take {disk} bytes, and may take {MOST_DISK}"
        return None

    def _end(self, judge: Judge) -> None:
        """Kill a running judge."""
        judge.end()
        # The judge may have died in the middle of a message to the process that forks candidates.
        session.end_all()

    def _clear(self, judge: Judge) -> None:
        """Remove the processes and files that a candidate left."""
        judge.child.kill()
        if first_process.first_process_number() is not None and not first_process.first_process_of_parent().alive:
            session.end_all()
        first = {number for number in (first_process.first_process_number(),) if number is not None}
        kill_descendants(first)
        kill_children(first)
        shutil.rmtree(judge.folder, ignore_errors=True)


# ---- the GPU


def gpu_answers() -> bool:
    """Return whether a kernel gives the right result on the GPU within `GPU_SECONDS` after a crash."""
    deadline = time.monotonic() + GPU_SECONDS
    while True:
        child = Child.fork(_sums, quiet=True)
        death = child.wait(GPU_QUESTION)
        child.kill()
        if death is not None and death.code == 0:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(1)


def _sums() -> int:
    return int(torch.ones(1024, device="cuda").sum().item() != 1024)


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


def main(descriptor: str, device: str, folder: str) -> None:
    """Serve the driver until it closes the connection, with `folder` for temporary files."""
    warnings.simplefilter("ignore")
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    adopt_orphans()  # processes that a candidate leaves behind become children of this process
    connection = Connection(int(descriptor))
    try:
        worker = WorkerProcess(connection)
        reason = GONE if device == "cuda" and not gpu_answers() else ""
        connection.send(Reply(f"{socket.gethostname()} {os.getpid()}", reason))
        worker.run()
    finally:
        session.end_all()
        shutil.rmtree(folder, ignore_errors=True)
