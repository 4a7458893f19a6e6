"""The messages between the driver, its workers and the judging processes."""

from dataclasses import dataclass

from fourfold.grading.candidates import Submission
from fourfold.grading.judging import Settings


@dataclass(frozen=True)
class Job:
    """A candidate for a worker to judge, with the seed of its cases and the lock file of the worker's GPU."""

    candidate: Submission
    settings: Settings
    seed: int
    gpu: str = ""


@dataclass(frozen=True)
class Reply:
    """The answer of a worker, which also says that it is ready.

    Attributes:
        worker: the machine and the process of the worker.
        end_reason: why the worker cannot judge another candidate; "" while it can.
        loss_reason: why there is no verdict; it says nothing of the candidate.
        stage: the last stage.
        verdict: the verdict as JSON; "" without one.
        seconds: the time that it took.
    """

    worker: str
    end_reason: str = ""
    loss_reason: str = ""
    stage: str = ""
    verdict: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class CheckBegun:
    """A judging process begins a check of a stage in a dtype."""

    stage: str
    check: str
    dtype: str


@dataclass(frozen=True)
class Judged:
    """A judging process has the verdict, as JSON."""

    stage: str
    verdict: str
