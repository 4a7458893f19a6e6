"""What the reports of a run come to: the verdict's entries, and what keeps the run from passing.

It is kept by a process that never imports a candidate, where there is one: the controller of pytest-xdist's workers, or
the process that has started the one that runs the tests.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from fourfold.engine.cells import CANDIDATE, Cell
from fourfold.engine.shortcomings import Coverage, listed, shortcomings
from fourfold.instruments.line_coverage import Executed
from fourfold.operations.claims import Claims
from fourfold.pytest_plugin.failures import SEARCH, Entries, skip_reason
from fourfold.pytest_plugin.identity import Identity
from fourfold.pytest_plugin.table import Matrix

# Among what a report carries: that its cell as a whole cannot run here.
NEVER = "never"


class Account:
    """The results of a run's tests.

    Args:
        config: of the run.

    Attributes:
        coverage: what was verified of each cell.
        matrix: the table.
        changed: what candidates have changed of the program that judges them, and what they have forged.
        executed: which of the implementations' lines have run.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.entries, self.matrix = config, Entries(), Matrix()
        self.coverage: dict[Cell, Coverage] = {}
        self.changed: list[str] = []
        self.executed = Executed()
        self._collected: dict[str, None] = {}
        self._with_result: set[str] = set()
        self._without_example: list[str] = []
        self._failed = False

    def collected(self, tests: Iterable[str]) -> None:
        """These tests are to be run."""
        self._collected |= dict.fromkeys(tests)

    def add(self, report: Any) -> Identity | None:
        """Count a report; gives what its test is for, if it is one of a cell that has come to a result."""
        if report.when == "call" or not report.passed:
            self._with_result.add(report.nodeid)
        self._failed |= report.failed
        identity = Identity.of_report(report)
        if identity is None or (report.when != "call" and report.passed):
            return None
        self.entries.add(identity, report)
        self.matrix.add(identity.cell, report)
        coverage = self.coverage.setdefault(identity.cell, Coverage())
        if report.skipped:
            coverage.unsupported.append(skip_reason(report))
            coverage.never |= any(name == NEVER for name, _ in report.user_properties)
        else:
            coverage.verified += 1
        seen = next((seen for name, seen in report.user_properties if name == SEARCH), None)
        if report.passed and identity.cell.backend == CANDIDATE and seen and seen["examples"] == 0:
            self._without_example.append(report.nodeid)
        return identity

    def shortcomings(self) -> list[str]:
        """Why the run has not passed although no check has failed."""
        given = self.config.getoption
        claims = None if given("claims") is None else Claims.parse(given("claims"))
        forward_only = given("forward_only") or (claims is not None and not claims.gradients)
        candidates = [text.partition("=")[0] for text in given("candidate")]
        lines = list(shortcomings(self.coverage, given("op"), given("backend"), candidates, forward_only))
        return lines + [f"not passed: {line}" for line in self.contradictions()]

    def contradictions(self) -> Iterator[str]:
        """What cannot be, in a run that has passed."""
        if self.changed:
            yield f"tampered: a candidate has changed what judges it: {listed(dict.fromkeys(self.changed))}"
        if self._without_example:
            yield f"passed without a call: {listed(self._without_example)}"
        missing = [test for test in self._collected if test not in self._with_result]
        if missing and not self.config.getoption("setuponly"):
            yield f"no result: {listed(missing)}"

    @property
    def failed(self) -> bool:
        """Whether any test has failed."""
        return self._failed

    def write(self, path: Path, passed: bool, about: Mapping[str, Any]) -> str:
        """Write the verdict; gives why it could not, if so."""
        if passed and is_of_all_checks(self.config):
            about = {**about, "never_executed": [each.as_dict() for each in self.executed.never()]}
        try:
            self.entries.write(path, passed, about)
        except Exception as error:
            return f"--verdict {path} is not written: {type(error).__name__}: {error}"
        return ""


def is_of_all_checks(config: pytest.Config) -> bool:
    """Whether a run is of every check of what it selects, or is asked for what never ran in it all the same."""
    if config.getoption("executed"):
        return True
    narrowing = ("keyword", "markexpr", "deselect", "lf", "stepwise", "ignore", "ignore_glob", "dtype", "reproduce")
    given = config.getoption("examples")
    few = given is not None and given < hypothesis.settings().max_examples
    parts = any("::" in argument or Path(argument).is_file() for argument in config.args)
    narrowed = parts or few or any(config.getoption(option, None) for option in narrowing)
    return bool(config.getoption("candidate")) and not narrowed


def conclude(
    config: pytest.Config, entries: Sequence[Mapping[str, Any]], false: int, code: int, end: Mapping[str, Any]
) -> tuple[int, Account, list[str]]:
    """What a run has come to, by all that its processes have told.

    Args:
        config: of the process that has started them.
        entries: that they have told.
        false: how many more were not their own.
        code: the exit code of the last one.
        end: what it has told last.

    Returns:
        the exit code, the account, and what keeps the run from passing that the run itself has not told.
    """
    account = Account(config)
    account.changed += end.get("changed", [])
    account.executed.add(end.get("executed"))
    if false:
        account.changed.append(f"{false} lines of the run's journal")
    for entry in entries:
        if "collected" in entry:
            account.collected(entry["collected"])
        if "report" in entry:
            account.add(config.hook.pytest_report_from_serializable(config=config, data=entry["report"]))
    status = end.get("status")
    if status is None:  # there was no session: its options were wrong
        return code or (int(pytest.ExitCode.INTERNAL_ERROR) if config.getoption("candidate") else 0), account, []
    if status != pytest.ExitCode.OK:
        return code or status, account, [*account.contradictions()] if account.changed else []
    lacking = account.shortcomings()
    if account.failed or lacking:
        return int(pytest.ExitCode.TESTS_FAILED), account, lacking
    return code, account, []
