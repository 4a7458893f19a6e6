"""Workers, and the threads that hand candidates to them. The pool replaces a lost worker, and loses no candidate."""

import contextlib
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import pynvml

from fourfold.grading.messages import Job, Reply
from fourfold.processes.child import Child
from fourfold.processes.messages import Connection, Ended, Malformed

# Seconds for a worker to import everything, and to answer after a candidate's own time is over.
STARTING_SECONDS, ANSWERING_SECONDS = 300.0, 120.0
# Seconds for a worker to end after it closed its connection.
SECONDS_TO_END = 5.0
# The number of failed starts in a row after which a worker's place is given up.
MOST_STARTS = 3
_DEVICES = "CUDA_VISIBLE_DEVICES"


class Lost(Exception):
    """A worker was lost with the candidate that it judged. This says nothing of the candidate."""


class NoWorkers(RuntimeError):
    """No worker can be started. The message has the reason."""


class Worker(Protocol):
    """A judge of one candidate at a time.

    Attributes:
        end_reason: why it cannot judge another candidate; "" while it can.
    """

    end_reason: str

    def judge(self, job: Job) -> Reply:
        """Return the answer on a candidate.

        Raises:
            Lost: the worker gives no answer.
        """

    def close(self) -> None:
        """End the worker, even while it judges."""


class LocalWorker:
    """A worker on this machine: see `fourfold.grading.worker`.

    Args:
        device: "cpu" or "cuda".
        gpu: its GPU, as ``CUDA_VISIBLE_DEVICES`` names it; None for none.

    Raises:
        Lost: the worker does not start.
    """

    def __init__(self, device: str, gpu: str | None = None) -> None:
        self.connection, peer = Connection.pair()
        # NVML reports GPUs without creating a context, after which a forked process could have none.
        environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self.folder = tempfile.mkdtemp()
        devices = os.environ.get(_DEVICES, "0") if gpu is None else gpu
        # The lock file of the GPU: workers share it except while one measures a time.
        self.gpu = str(Path(tempfile.gettempdir(), f"fourfold-gpu-{devices}.lock")) if device == "cuda" else ""
        if gpu is not None:
            environment[_DEVICES] = gpu
        with peer:
            arguments = peer.fileno(), device, self.folder
            self.child = Child.spawn(
                "fourfold.grading.worker", *arguments, files=[arguments[0]], environment=environment, plain=True
            )
        self.end_reason = self._receive(STARTING_SECONDS).end_reason
        if self.end_reason:
            self.close()
            raise Lost(self.end_reason)

    def judge(self, job: Job) -> Reply:
        """Return the answer on a candidate."""
        try:
            self.connection.within(STARTING_SECONDS).send(replace(job, gpu=self.gpu))
        except (Ended, OSError) as error:
            raise self._cause_of_loss(error) from None
        answer = self._receive(job.candidate.seconds + ANSWERING_SECONDS)
        self.end_reason = answer.end_reason
        return answer

    def _receive(self, seconds: float) -> Reply:
        try:
            return self.connection.within(seconds).receive(Reply)
        except (Ended, Malformed, OSError) as error:  # a TimeoutError is one of these
            raise self._cause_of_loss(error) from None

    def _cause_of_loss(self, error: Exception) -> Lost:
        death = self.child.wait(SECONDS_TO_END if isinstance(error, Ended) else 0)
        self.close()
        return Lost(f"the worker {death if death is not None else f'does not answer ({error!r})'}")

    def close(self) -> None:
        """End the worker and the processes that it started."""
        with contextlib.suppress(OSError):
            self.connection.end.shutdown(socket.SHUT_RDWR)  # the worker then ends its children and itself
        self.child.wait(10)
        self.child.kill()
        self.connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Task:
    """A candidate to be judged.

    Attributes:
        job: the message to a worker.
        attempts: the number of attempts so far.
        losses: the reason why each failed attempt failed.
    """

    job: Job
    key: str
    attempts: int = 0
    losses: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TaskEvent:
    """An event of a task: an answer, or the loss of its worker. Without a task, a place was given up."""

    task: Task | None
    answer: Reply | None
    reason: str = ""


# Seconds for the threads of a pool to end after their workers.
THREAD_SECONDS = 10.0


class Pool:
    """A fixed number of concurrent workers.

    Args:
        make: makes a worker, given the number of its place.
        places: the number of workers.
        interrupt: ends waiting in `make`.
    """

    def __init__(
        self, make: Callable[[int], Worker], places: int, interrupt: Callable[[], object] = lambda: None
    ) -> None:
        self.make, self.places, self.interrupt = make, places, interrupt
        self.tasks: queue.Queue[Task | None] = queue.Queue()
        self.events: queue.Queue[TaskEvent] = queue.Queue()
        self.closed = False
        self._workers: dict[int, Worker] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), daemon=True, name=f"worker {number}")
            for number in range(places)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, number: int) -> None:
        """Hand tasks to the worker of one place, and replace it if it is lost."""
        failures = 0
        while not self.closed:
            try:
                worker = self.make(number)
            except Exception as error:
                failures += 1
                if failures >= MOST_STARTS:
                    self.events.put(TaskEvent(None, None, f"{type(error).__name__}: {error}"))
                    return
                continue
            failures = 0
            self._workers[number] = worker
            if not self._employ(worker):
                worker.close()
                return
            worker.close()

    def _employ(self, worker: Worker) -> bool:
        """Hand tasks to a worker until it is lost; return whether more tasks may follow."""
        while True:
            task = self.tasks.get()
            if task is None or self.closed:
                return False
            task.attempts += 1
            try:
                answer = worker.judge(task.job)
            except Exception as error:
                self.events.put(TaskEvent(task, None, f"{error}"))
                return True
            self.events.put(TaskEvent(task, answer))
            if worker.end_reason:
                return True

    def close(self) -> None:
        """End all workers, even while they judge."""
        self.closed = True
        for _ in self._threads:
            self.tasks.put(None)
        closers = [threading.Thread(target=worker.close) for worker in list(self._workers.values())]
        for closer in closers:
            closer.start()
        self.interrupt()
        for closer in closers:
            closer.join()
        # A thread that still waited for a worker would use objects that vanish at the end of this process.
        deadline = time.monotonic() + THREAD_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def gpus_here() -> list[str]:
    """Return the usable GPUs of this machine, as ``CUDA_VISIBLE_DEVICES`` names them."""
    if (devices := os.environ.get(_DEVICES)) is not None:
        return [name.strip() for name in devices.split(",") if name.strip()]
    try:
        pynvml.nvmlInit()
        return [str(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
