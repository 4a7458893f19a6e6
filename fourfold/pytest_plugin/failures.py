"""The text of a failure, the command that repeats it, and a run's checks as JSON."""

import importlib.metadata
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fourfold.backends.cuda.declarations import SUFFIXES
from fourfold.backends.triton import compilation
from fourfold.candidates.frames import cause, own_frames, spelled
from fourfold.candidates.integrity.escapes import Escape
from fourfold.candidates.process.client import CALL_SECONDS
from fourfold.candidates.process.session import Unanswered
from fourfold.compat import hypothesis_internals, pytest_internals
from fourfold.engine.cells import CANDIDATE, Selection, SelectionError
from fourfold.engine.failures import counterexample, failure_grade, failure_message, kind_of
from fourfold.instruments.tampering import Tampered
from fourfold.operations.boundary import Boundary
from fourfold.operations.outcomes import Failure
from fourfold.pytest_plugin.identity import Identity

# The names of user properties in a test's report: the record of a search, and the failure.
SEARCH, FAILURE = "search", "failure"
DEVICE = pytest.StashKey[str]()
SELECTION = pytest.StashKey[Selection]()


def tell(item: pytest.Item, report: pytest.TestReport, error: BaseException, identity: Identity, at: str) -> None:
    """Show in the report of a failed check the error, its case and the command that repeats it, without our own code.

    Args:
        item: the test.
        report: of its failure.
        error: the exception that failed it.
        identity: the identity of the test.
        at: the last case that ran; "" if there is none.
    """
    notes = "\n".join(map(str, getattr(error, "__notes__", [])))
    case = counterexample(notes)
    repeated = repeat(item.config, item.path, item.nodeid, identity, notes)
    origin = item.config.stash[SELECTION].origin(identity.cell)
    frames = own_frames(error, origin)
    of_a_check = isinstance(error, Failure | Escape | SelectionError | Tampered | Unanswered)
    of_cuda = origin.suffix in SUFFIXES and not of_a_check  # no frame of Python's is in such a file
    message = failure_message(error, frames)
    failure = {"message": message, "counterexample": case or at or None, "repeat": repeated}
    kind = kind_of(error, frames)
    failure |= {"kind": kind, "grade": failure_grade(kind)}
    if frames:
        failure["cause"] = cause(error, frames)
    elif of_cuda:
        failure["cause"] = f"{origin}:{getattr(error, 'line', '')}: {type(error).__name__}"
    if item.config.getoption("--tb") == "auto" and (frames or of_a_check or of_cuda):
        whose = f"{' · '.join([*vars(identity.cell).values(), item.config.stash[DEVICE]])}: "
        said = message if isinstance(error, Failure | SelectionError) else f"{whose}{message}"
        seen = without_advice(notes) if case or not at else f"at {at}"
        report.longrepr = "\n\n".join(filter(None, (f"{said}\n{spelled(frames)}".rstrip(), seen)))
    report.user_properties.append((FAILURE, failure))
    report.sections.append(("repeat with", repeated))


def refer(report: Any, first: str) -> None:
    """Shorten a failure whose cause was already reported."""
    failure = next(value for name, value in report.user_properties if name == FAILURE)
    (line, *_) = failure["message"].splitlines()
    case = failure["counterexample"]
    report.longrepr = f"same cause as {first}: {line}" + (f"\n\nat {case}" if case else "")


def without_advice(notes: str) -> str:
    """Remove Hypothesis's advice on how to repeat a case: a command of ours does it."""
    return re.sub(r"^.*@reproduce_failure\(.*$", "", notes, flags=re.MULTILINE).rstrip()


def repeat(config: pytest.Config, path: Path, nodeid: str, identity: Identity | None, notes: str = "") -> str:
    """Return the command that runs one failed check again, from the user's folder.

    Args:
        config: of the run.
        path: of the test's file.
        nodeid: pytest's name for the test.
        identity: the identity of the test.
        notes: of the error; if Hypothesis names a case in them, the command runs only that case.
    """
    here = config.invocation_params.dir
    file = path.relative_to(here) if path.is_relative_to(here) else path
    command = ["pytest", "::".join([str(file), *nodeid.split("::")[1:]])]
    for plugin in config.getoption("plugins"):
        if plugin.partition(".")[0] == "fourfold":
            command += ["-p", plugin]
    device = config.stash.get(DEVICE, config.getoption("device"))
    if device != "auto":
        command += ["--device", device]
    if (seconds := config.getoption("compile_seconds")) != compilation.SECONDS:
        command.append(f"--compile-seconds={seconds:g}")
    if identity is not None and identity.cell.backend == CANDIDATE:
        operation = identity.cell.operation
        own = [text for text in config.getoption("candidate") if text.partition("=")[0] == operation]
        command += ["--candidate", *own]
        for option in ("forbid_fallback", "no_refusals", "strict_errors", "untrusted"):
            if config.getoption(option):
                command.append(f"--{option.replace('_', '-')}")
        if (seconds := config.getoption("call_seconds")) != CALL_SECONDS:
            command.append(f"--call-seconds={seconds:g}")
        if config.getoption("claims"):
            command += ["--claims", config.getoption("claims")]
    if blob := hypothesis_internals.blob_in(notes):
        command += ["--reproduce", blob]
    return shlex.join(command)


class Entries:
    """The checks of a run, one entry each, as ``--verdict FILE`` writes them."""

    def __init__(self) -> None:
        self.checks: dict[str, dict[str, Any]] = {}

    def add(self, identity: Identity, report: pytest.TestReport) -> None:
        """Count a report; of several reports of a test, keep the worst."""
        entry = self.checks.setdefault(
            report.nodeid,
            {**vars(identity.cell), "check": identity.check, "test": report.nodeid, "outcome": "passed"},
        )
        if report.failed:
            entry |= {"outcome": "failed", "message": report.longreprtext}
        elif report.skipped:
            entry |= {"outcome": "unsupported", "reason": skip_reason(report)}
        for key, seen in report.user_properties:
            if key == SEARCH and isinstance(seen, dict):
                entry |= {"worst_error_over_bound": seen["worst"], "examples": seen["examples"]}
                told = ("grade", "refusals", "warnings", "remarks", "unreached", "constants")
                entry |= {name: seen[name] for name in told if seen[name]}
                if seen["refusals"]:
                    refused = sum(seen["refusals"].values())
                    entry["refused_share"] = refused / (refused + seen["examples"])
                    entry["suggested_claim"] = Boundary.of(seen["boundary"]).claim()
                entry["seconds"] = round(seen["seconds"], 3)
            elif key == FAILURE and isinstance(seen, dict):
                entry |= seen

    def write(self, path: Path, passed: bool, about: Mapping[str, Any]) -> None:
        """Write the file atomically.

        Raises:
            OSError: the file cannot be written any more.
        """
        outcomes = [entry["outcome"] for entry in self.checks.values()]
        content = {
            "passed": passed,
            "counts": {name: outcomes.count(name) for name in ("passed", "failed", "unsupported")},
            **about,
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton", "numpy", "hypothesis")},
            "checks": list(self.checks.values()),
        }
        unfinished = path.with_name(path.name + ".unfinished")
        unfinished.write_text(json.dumps(content, indent=1, default=str) + "\n")
        unfinished.replace(path)


def skip_reason(report: pytest.TestReport) -> str:
    """Return why a test was skipped."""
    return pytest_internals.skip_reason_of(report)
