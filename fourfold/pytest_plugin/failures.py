"""The text of a failure, the command that repeats it, and a run's checks as JSON."""

import importlib.metadata
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold.backends.cuda.declarations import SUFFIXES
from fourfold.candidates.integrity.escapes import Escape
from fourfold.candidates.process.first_process import Unanswered
from fourfold.checks.search import NAMED
from fourfold.engine.cells import CANDIDATE, Selection, SelectionError, operation_in
from fourfold.engine.failures import notes_of
from fourfold.engine.verdict import Finding, Outcome, heading
from fourfold.instruments.tampering import Tampered
from fourfold.operations.boundary import Boundary
from fourfold.operations.limits import CALL_SECONDS, COMPILE_SECONDS
from fourfold.operations.outcomes import Failure, Status
from fourfold.processes.files import write_atomically
from fourfold.pytest_plugin.identity import Identity

# The name of its outcome among the user properties of a test's report.
OUTCOME = "outcome"
DEVICE = pytest.StashKey[str]()
SELECTION = pytest.StashKey[Selection]()
# The title of the section of a failed test's report with the command that repeats it.
REPEAT = "repeat with"


def tell(
    item: pytest.Item, report: pytest.TestReport, error: BaseException, identity: Identity, failure: Finding
) -> str:
    """Show in the report of a failed check the error, its case and the command that repeats it, without our own code.

    Args:
        item: the test.
        report: of its failure.
        error: the exception that failed it.
        identity: the identity of the test.
        failure: the finding of its failure.

    Returns:
        the line of the implementation that raised the error, as a key; "" if there is none.
    """
    origin = item.config.stash[SELECTION].origin(identity.cell)
    of_a_check = isinstance(error, Failure | Escape | SelectionError | Tampered | Unanswered)
    of_cuda = origin.suffix in SUFFIXES and not of_a_check  # no frame of Python's is in such a file
    if item.config.getoption("--tb") == "auto" and (failure.frames or of_a_check or of_cuda):
        prefix = f"{' · '.join([*vars(identity.cell).values(), item.config.stash[DEVICE]])}: "
        message = failure.message if isinstance(error, Failure | SelectionError) else f"{prefix}{failure.message}"
        notes = (line for line in notes_of(error).splitlines() if line.startswith(NAMED))
        place = next(notes, f"at {failure.counterexample}" if failure.counterexample else "")
        likely = f"likely cause: {failure.likely_cause}" if failure.likely_cause else ""
        report.longrepr = "\n\n".join(filter(None, (f"{message}\n{failure.frames}".rstrip(), likely, place)))
    command = repeat(item.config, item.path, item.nodeid, identity, failure.blob)
    report.sections.append((REPEAT, command))
    if of_cuda and not failure.frames:
        return f"{origin}:{getattr(error, 'line', '')}: {type(error).__name__}"
    return failure.cause if failure.frames else ""


def refer(report: Any, first: str, failure: Finding) -> None:
    """Shorten a failure whose cause was already reported; leave out its case if the cause is a wrong result."""
    (line, *_) = failure.message.splitlines()
    case = failure.counterexample if failure.frames else ""
    report.longrepr = f"same cause as {first}: {line}" + (f"\n\nat {case}" if case else "")
    report.refers = True


def reported_outcome(report: Any) -> Outcome:
    """Return the outcome that a report carries, with the status that the report itself has."""
    carried = next((value for name, value in report.user_properties if name == OUTCOME), None)
    status = {"passed": Status.PASSED, "failed": Status.FAILED}.get(report.outcome, Status.UNSUPPORTED)
    outcome = Outcome.of(carried) if carried else Outcome(check="", dtype="", outcome=status)
    if status is Status.UNSUPPORTED and outcome.outcome not in (Status.PASSED, Status.FAILED):
        return outcome
    return replace(outcome, outcome=status)


def repeat(config: pytest.Config, path: Path, nodeid: str, identity: Identity | None, blob: str | None) -> str:
    """Return the command that runs one failed check again, from the user's folder.

    Args:
        config: of the run.
        path: of the test's file.
        nodeid: pytest's name for the test.
        identity: the identity of the test.
        blob: Hypothesis's, of the case that the command runs alone; None to run the whole test.
    """
    folder = config.invocation_params.dir
    file = path.relative_to(folder) if path.is_relative_to(folder) else path
    command = ["pytest", "::".join([str(file), *nodeid.split("::")[1:]])]
    for plugin in config.getoption("plugins"):
        if plugin.partition(".")[0] == "fourfold":
            command += ["-p", plugin]
    for option, name in (("-c", "inifilename"), ("--rootdir", "rootdir")):
        if place := config.getoption(name):
            command += [option, os.path.relpath(folder / place, folder)]
    device = config.stash.get(DEVICE, config.getoption("device"))
    if device != "auto":
        command += ["--device", device]
    if (seconds := config.getoption("compile_seconds")) != COMPILE_SECONDS:
        command.append(f"--compile-seconds={seconds:g}")
    if identity is not None and identity.cell.backend == CANDIDATE:
        operation = identity.cell.operation
        candidates = [text for text in config.getoption("candidate") if operation_in(text) == operation]
        command += ["--candidate", *candidates]
        for option in ("forbid_fallback", "no_refusals", "strict_errors", "untrusted"):
            if config.getoption(option):
                command.append(f"--{option.replace('_', '-')}")
        if (seconds := config.getoption("call_seconds")) != CALL_SECONDS:
            command.append(f"--call-seconds={seconds:g}")
        if config.getoption("claims"):
            command += ["--claims", config.getoption("claims")]
    if blob:
        command += ["--reproduce", blob]
    if config.getoption("case"):
        command += ["--case", str(config.getoption("case"))]
    return shlex.join(command)


class Entries:
    """The checks of a run, one entry each, as ``--verdict FILE`` writes them."""

    def __init__(self) -> None:
        self.checks: dict[str, dict[str, Any]] = {}
        self._outcomes: dict[str, Outcome] = {}

    def add(self, identity: Identity, report: pytest.TestReport, outcome: Outcome) -> None:
        """Count a report and its outcome; of several reports of a test, keep the last."""
        self._outcomes[report.nodeid] = outcome
        names = {**vars(identity.cell), "check": identity.check, "test": report.nodeid}
        entry = self.checks.setdefault(report.nodeid, {})
        entry |= {"message": report.longreprtext} if report.failed else {}
        entry |= outcome.as_check() | names
        if outcome.search is not None:
            entry |= {
                name: value
                for name, value in outcome.search.items()
                if value and name not in ("boundary", "reproduces")
            }
            if outcome.refusals:
                entry["suggested_claim"] = Boundary.of(outcome.search["boundary"]).claim()
        if outcome.failure:
            entry["repeat"] = dict(report.sections)[REPEAT]

    def write(self, path: Path, passed: bool, facts: Mapping[str, Any]) -> None:
        """Write the file atomically, as docs/verdict.schema.json describes it.

        Raises:
            OSError: the file cannot be written any more.
        """
        content = {
            **heading([*self._outcomes.values()], passed),
            **facts,
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton", "numpy", "hypothesis")},
            "checks": list(self.checks.values()),
        }
        write_atomically(path, (json.dumps(content, indent=1, default=str) + "\n").encode())
