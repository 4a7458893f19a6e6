"""Preparation of a process that runs tests: the device, the selection, and the imported candidates."""

import contextlib
import os
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from types import FrameType

import pytest
import torch

from fourfold.backends.triton import takeover
from fourfold.checks.records import operations
from fourfold.engine.cells import Candidate, Selection, SelectionError, operation_in
from fourfold.operations.case_file import CaseFile
from fourfold.operations.claims import Claims
from fourfold.operations.record import Operation
from fourfold.pytest_plugin.black_box import BlackBox
from fourfold.pytest_plugin.failures import DEVICE, SELECTION

CASE = pytest.StashKey[CaseFile]()


class _Late(BaseException):
    """The time limit is up; not an Exception, so that `except Exception` does not catch it."""


def chosen_device(config: pytest.Config) -> str:
    """Return the device of --device; xdist asks for it before the configuration exists."""
    device = config.getoption("device")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def prepare(config: pytest.Config) -> None:
    """Determine the device and the selection of the run.

    Raises:
        pytest.UsageError: an option names something unknown, there is no GPU for --device cuda, or --case is no case of
            the candidate's operation.
    """
    device = config.stash[DEVICE] = chosen_device(config)
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch finds no GPU")
    triton_for(device)
    try:
        records = known_operations(config)
        if config.getoption("untrusted_where_possible") and may_be_untrusted(config, records):
            config.option.untrusted = True
        claims = None if config.getoption("claims") is None else Claims.parse(config.getoption("claims"))
        if config.getoption("case"):
            config.stash[CASE] = CaseFile.read(config.getoption("case"))
            config.option.dtype = [config.stash[CASE].dtype]
        config.stash[SELECTION] = Selection.of(
            records,
            config.getoption("candidate"),
            op=config.getoption("op"),
            backend=config.getoption("backend"),
            dtype=config.getoption("dtype"),
            claims=claims,
            strict_errors=config.getoption("strict_errors"),
            call_seconds=config.getoption("call_seconds") if are_untrusted(config, device) else None,
        )
        if CASE in config.stash and (name := config.stash[CASE].operation) not in config.stash[SELECTION].candidates:
            names = ", ".join(config.stash[SELECTION].candidates) or "none"
            raise ValueError(f"--case {config.getoption('case')}: expected a kernel of {name}, found {names}")
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def triton_for(device: str) -> None:
    """Select Triton's interpreter on the CPU, or its compiler for a GPU; a conftest.py may have imported Triton."""
    if device == "cpu":
        # Before a candidate is loaded: the results of its kernels must not depend on the rest of the selection.
        takeover.interpret_kernels()
    else:
        os.environ["TRITON_INTERPRET"] = "0"


def known_operations(config: pytest.Config) -> dict[str, Operation]:
    """Return the known operations; those of the candidates alone, if the run is about nothing else.

    To import the records of all operations takes as long as the first failure of a wrong kernel.
    """
    candidates = config.getoption("candidate")
    if candidates and not (config.getoption("op") or config.getoption("backend")):
        names = {operation_in(text) for text in candidates if ":" not in text.partition("=")[0]}
        records = operations(names)
        if names <= records.keys():
            return records
    return operations()


def may_be_untrusted(config: pytest.Config, records: Collection[str]) -> bool:
    """Return whether all candidates can run in their own process, and no debugger is requested.

    A candidate that declares its own operation cannot: the judge imports its file.
    """
    debugs = config.getoption("usepdb") or config.getoption("trace")
    candidates = [Candidate.parse(text, records) for text in config.getoption("candidate")]
    return chosen_device(config) == "cpu" and not debugs and not any(c.judges_itself for c in candidates)


def are_untrusted(config: pytest.Config, device: str) -> bool:
    """Return whether candidates run in their own process.

    Raises:
        pytest.UsageError: an option requires it, but the device is not the CPU.
    """
    if not config.getoption("candidate") or not config.getoption("untrusted"):
        return False
    if device != "cpu":
        raise pytest.UsageError(
            "--untrusted needs --device cpu: memory of a GPU is not shared with another process yet"
        )
    return True


def import_candidates(candidates: Sequence[Candidate], seconds: float, box: BlackBox | None = None) -> None:
    """Import each candidate within the time limit.

    Args:
        candidates: the candidates to import.
        seconds: the time limit of each; 0 for no limit.
        box: records which one is being imported, and ends the process if Python cannot interrupt the import.

    Raises:
        pytest.UsageError: an import does not end in time or fails, or the function does not exist.
    """
    for candidate in candidates:
        try:
            with _watch(candidate, seconds, box), _interrupted_after(seconds):
                candidate.load()
        except SelectionError as error:
            raise pytest.UsageError(str(error)) from error
        except _Late as late:
            limit = f"within {seconds:g} s, the time limit of a test"
            raise pytest.UsageError(
                f"--candidate {candidate}: its import has not ended {limit}: it was {late}"
            ) from late


def time_limit(config: pytest.Config) -> float:
    """Return a test's time limit in seconds, by pytest-timeout's option, variable or setting; 0 if there is none."""
    with contextlib.suppress(ValueError):  # not a number, or no such setting without the plugin
        for limit in (config.getoption("timeout", None), os.environ.get("PYTEST_TIMEOUT"), config.getini("timeout")):
            if limit is not None and limit != "":
                return float(limit)
    return 0.0


@contextlib.contextmanager
def _watch(candidate: Candidate, seconds: float, box: BlackBox | None) -> Iterator[None]:
    if box is None:
        yield
        return
    box.importing(f"--candidate {candidate}")
    if seconds:
        box.expect_within(seconds)
    try:
        yield
    finally:
        box.expect_nothing()
        box.importing("")


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Late(f"at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else "somewhere")

    former = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
