"""The account of a run: the verdict's entries, and reasons why the run does not pass.

If possible, a process that never imports a candidate keeps the account: the controller of pytest-xdist's workers, or
the parent of the process that runs the tests.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from fourfold.engine.cells import CANDIDATE, Cell, operation_in
from fourfold.engine.shortcomings import join_names, shortcomings
from fourfold.instruments.line_coverage import Executed
from fourfold.operations.claims import Claims
from fourfold.operations.outcomes import Exclusion, Status
from fourfold.pytest_plugin.failures import Entries, reported_outcome
from fourfold.pytest_plugin.identity import Identity
from fourfold.pytest_plugin.table import Matrix


class Account:
    """The results of a run's tests.

    Args:
        config: of the run.

    Attributes:
        coverage: the checks of each cell: see `fourfold.engine.shortcomings.Coverage`.
        matrix: the table.
        changed: changes of candidates to the program that judges them, and forged entries.
        executed: the lines of the implementations that ran.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.entries, self.matrix = config, Entries(), Matrix()
        self.coverage: dict[Cell, list[Exclusion | Status]] = {}
        self.changed: list[str] = []
        self.executed = Executed()
        self._collected: dict[str, None] = {}
        self._with_result: set[str] = set()
        self._without_example: list[str] = []
        self._failed = False

    def expect(self, tests: Iterable[str]) -> None:
        """Record the tests that are about to run."""
        self._collected |= dict.fromkeys(tests)

    def add(self, report: Any) -> Identity | None:
        """Count a report; return the identity of its test if that belongs to a cell and the report gives a result."""
        if report.when == "call" or not report.passed:
            self._with_result.add(report.nodeid)
        self._failed |= report.failed
        identity = Identity.of_report(report)
        if identity is None or (report.when != "call" and report.passed):
            return None
        outcome = reported_outcome(report)
        self.entries.add(identity, report, outcome)
        self.matrix.add(identity.cell, outcome)
        self.coverage.setdefault(identity.cell, []).append(outcome.exclusion or outcome.outcome)
        if report.passed and identity.cell.backend == CANDIDATE and outcome.search and not outcome.examples:
            self._without_example.append(report.nodeid)
        return identity

    def shortcomings(self) -> list[str]:
        """Return why the run does not pass although no check failed."""
        option = self.config.getoption
        claims = None if option("claims") is None else Claims.parse(option("claims"))
        forward_only = option("forward_only") or (claims is not None and not claims.gradients)
        candidates = [operation_in(text) for text in option("candidate")]
        lines = shortcomings(self.coverage, option("op"), option("backend"), candidates, forward_only)
        return [*lines, *self.contradictions()]

    def contradictions(self) -> Iterator[str]:
        """Yield the contradictions to a passed run: tampering, passes without a call, and missing results."""
        if self.changed:
            yield f"tampered: a candidate has changed what judges it: {join_names(dict.fromkeys(self.changed))}"
        if self._without_example:
            yield f"passed without a call: {join_names(self._without_example)}"
        unreported = [test for test in self._collected if test not in self._with_result]
        if unreported and not self.config.getoption("setuponly"):
            yield f"no result: {join_names(unreported)}"

    @property
    def has_failures(self) -> bool:
        """Return whether any test failed."""
        return self._failed

    def write(self, path: Path, passed: bool, facts: Mapping[str, Any]) -> str:
        """Write the verdict; return why it could not be written, or ""."""
        causes = [] if passed else self.shortcomings()
        facts = {**facts, "shortcomings": causes, "suggested_claim": self.matrix.suggested_claim(passed)}
        if passed and is_of_all_checks(self.config):
            facts = {**facts, "never_executed": [stretch.as_dict() for stretch in self.executed.never()]}
        try:
            self.entries.write(path, passed, facts)
        except Exception as error:
            return f"--verdict {path} is not written: {type(error).__name__}: {error}"
        return ""


def is_of_all_checks(config: pytest.Config) -> bool:
    """Return whether a run makes every check of its selection, or must list unexecuted lines anyway."""
    if config.getoption("executed"):
        return True
    narrowing = ("keyword", "markexpr", "deselect", "lf", "stepwise", "ignore", "ignore_glob", "dtype", "reproduce")
    count = config.getoption("examples")
    is_short = count is not None and count < hypothesis.settings().max_examples
    names_tests = any("::" in argument or Path(argument).is_file() for argument in config.args)
    is_partial = names_tests or is_short or any(config.getoption(option, None) for option in narrowing)
    return bool(config.getoption("candidate")) and not is_partial


def conclude(
    config: pytest.Config, entries: Sequence[Mapping[str, Any]], false: int, code: int, end: Mapping[str, Any]
) -> tuple[int, Account, list[str]]:
    """Evaluate a run from the entries that its processes wrote.

    Args:
        config: of the parent process.
        entries: written by the processes.
        false: the number of further entries that were not their own.
        code: the exit code of the last process.
        end: its last entry.

    Returns:
        the exit code, the account, and the reasons against passing that the run itself did not report.
    """
    account = Account(config)
    account.changed += end.get("changed", [])
    account.executed.add(end.get("executed"))
    if false:
        account.changed.append(f"{false} lines of the run's journal")
    for entry in entries:
        if "collected" in entry:
            account.expect(entry["collected"])
        if "report" in entry:
            account.add(config.hook.pytest_report_from_serializable(config=config, data=entry["report"]))
    status = end.get("status")
    if status is None:  # there was no session: its options were wrong
        return code or (int(pytest.ExitCode.INTERNAL_ERROR) if config.getoption("candidate") else 0), account, []
    if status != pytest.ExitCode.OK:
        return code or status, account, [*account.contradictions()] if account.changed else []
    lacking = account.shortcomings()
    if account.has_failures or lacking:
        return int(pytest.ExitCode.TESTS_FAILED), account, lacking
    return code, account, []
