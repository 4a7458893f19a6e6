"""What a run says of each check: the text of a failure, the command that repeats it, and all of it as JSON."""

import importlib.metadata
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from properties.cells import CANDIDATE, Cell
from properties.checks import Failure

# What a test's report carries besides pytest's own, by name: what a search has seen, and how it has failed.
SEARCH, FAILURE = "search", "failure"
DEVICE = pytest.StashKey[str]()


def tell(item: pytest.Item, report: pytest.TestReport, error: BaseException) -> None:
    """Let the report of a failed check show its case and what repeats it, not the way through the machinery."""
    notes = "\n".join(getattr(error, "__notes__", []))
    if isinstance(error, Failure) and item.config.getoption("tbstyle") == "auto":
        report.longrepr = f"{error}\n\n{notes}".rstrip()
    message = f"{error}" if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
    repeated = repeat(item.config, item.nodeid, notes)
    failure = {"message": message, "counterexample": counterexample(notes), "repeat": repeated}
    report.user_properties.append((FAILURE, failure))
    report.sections.append(("repeat with", repeated))


def counterexample(notes: str) -> str | None:
    """The case that the notes of an error show, ours of a named one or Hypothesis's of one that it has found."""
    shown = re.search(r"^(?:Named example .*?: |\s*case=)(Case\(.*\))", notes, re.MULTILINE)
    return shown[1] if shown else None


def repeat(config: pytest.Config, nodeid: str, notes: str = "") -> str:
    """The command that runs one failed check again; of the case alone that `notes`, Hypothesis's, name."""
    command = ["pytest", nodeid]
    device = config.stash.get(DEVICE, config.getoption("device"))
    if device != "auto":
        command += ["--device", device]
    cell = Cell.of_test(nodeid)
    if cell is not None and cell.backend == CANDIDATE:
        own = [text for text in config.getoption("candidate") if text.partition("=")[0] == cell.operation]
        command += ["--candidate", *own]
        if config.getoption("forbid_fallback"):
            command.append("--forbid-fallback")
    if blob := re.search(r"@reproduce_failure\('[^']*', b'([^']*)'\)", notes):
        command += ["--reproduce", blob[1]]
    return shlex.join(command)


class Verdict:
    """The checks of a run, one entry each, as ``--verdict FILE`` writes them."""

    def __init__(self) -> None:
        self.checks: dict[str, dict[str, Any]] = {}

    def add(self, cell: Cell, report: pytest.TestReport) -> None:
        """Count a report; of a test's several the worst stands."""
        path, _, name = report.nodeid.partition("::")
        test, _, parameters = name.partition("[")
        law = parameters.removesuffix("]").removeprefix(str(cell)).removeprefix("-")
        entry = self.checks.setdefault(
            report.nodeid,
            {
                **vars(cell),
                "check": f"{Path(path).stem.removeprefix('test_')}: {law or test.removeprefix('test_')}".replace(
                    "_", " "
                ),
                "test": report.nodeid,
                "outcome": "passed",
            },
        )
        if report.failed:
            entry |= {"outcome": "failed", "message": report.longreprtext}
        elif report.skipped:
            entry |= {"outcome": "unsupported", "reason": skip_reason(report)}
        for key, seen in report.user_properties:
            if key == SEARCH and isinstance(seen, dict):
                entry |= {"worst_error_over_bound": seen["worst"], "examples": seen["examples"]}
                entry["seconds"] = round(seen["seconds"], 3)
            elif key == FAILURE and isinstance(seen, dict):
                entry |= seen

    def unsupported(self) -> list[dict[str, Any]]:
        """The checks that were not run, for a reason."""
        return [entry for entry in self.checks.values() if entry["outcome"] == "unsupported"]

    def write(self, path: Path, passed: bool, about: Mapping[str, Any]) -> None:
        """Write the file, whole or not at all."""
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
    """Why a test was skipped."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple | list) else report.longreprtext
    return str(why).removeprefix("Skipped: ")
