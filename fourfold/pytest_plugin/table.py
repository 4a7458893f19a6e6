"""The table that closes a run: the results of each cell, and why some checks did not run."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fourfold.backends import BACKENDS
from fourfold.engine.cells import CANDIDATE, Cell
from fourfold.engine.tables import table_lines
from fourfold.engine.verdict import Outcome, refusal_lines, suggestion
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.boundary import Boundary
from fourfold.operations.claims import STORAGE
from fourfold.operations.outcomes import IN_TABLES, Kind, Status

# Footnotes for failures other than wrong results.
KINDS = {
    Kind.IMPRECISE: "imprecise: right if each intermediate is rounded to the dtype, which is not claimed",
    Kind.UNDECIDED: "undecided: the definition or Fourfold has failed, which says nothing of the kernel",
    Kind.CRASHED: "crashed: the process that ran the kernel died",
    Kind.TIMED_OUT: "timed out: the kernel did not return in time",
    Kind.TAMPERED: "tampered: the kernel changed what judges it",
}
# The number of warnings of a cell.
SHOWN = 4


@dataclass
class Tally:
    """The results of the checks of one cell."""

    worst: float = 0.0
    examples: int = 0
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    # The kinds of the failures.
    kinds: set[str] = field(default_factory=set)
    # The reasons why checks did not run, each with the number of checks.
    skipped: dict[str, int] = field(default_factory=dict)
    # The number of refused cases, by reason.
    refusals: Counter[str] = field(default_factory=Counter)
    # The boundary between refused and accepted cases.
    boundary: Boundary = field(default_factory=Boundary)
    # Observations that are no failures.
    warnings: list[str] = field(default_factory=list)
    # Cases that were not reached, and observations beyond the claim of a check, of a candidate or a case to reproduce.
    remarks: list[str] = field(default_factory=list)
    # Whether the implementation is right only with storage accuracy.
    storage: bool = False
    # The constants in a candidate's source that give sizes, in a line.
    constants: str = ""

    def add(self, outcome: Outcome, of_candidate: bool) -> None:
        """Add the outcome of a check."""
        if outcome.outcome is Status.FAILED:
            self.failed += 1
            self.kinds |= {outcome.failure.kind} if outcome.failure else set()
        elif outcome.outcome is Status.PASSED:
            self.passed += 1
        else:
            reason = outcome.reason or ""
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if outcome.search is None:
            return
        search = outcome.search
        self.worst = max(self.worst, outcome.worst)
        self.examples += outcome.examples
        self.seconds += outcome.seconds
        self.refusals.update(outcome.refusals)
        self.boundary.update(Boundary.of(search["boundary"]))
        self.warnings += [warning for warning in search["warnings"] if warning not in self.warnings]
        self.remarks += [warning for warning in search["unreached"] if warning not in self.remarks]
        self.storage |= outcome.grade == STORAGE
        if of_candidate or search["reproduces"]:
            remarks = (f"{outcome.check}: {remark}" for remark in search["remarks"])
            self.remarks += [remark for remark in remarks if remark not in self.remarks]
        if of_candidate:
            self.constants = self.constants or search["constants"]

    def show(self, footnote: "Footnotes") -> str:
        """Return the worst error over its bound, examples and seconds; or the number of failures; or a footnote."""
        notes = "".join(footnote.mark(reason) for reason in self.skipped)
        if self.failed:
            notes += "".join(footnote.mark(KINDS[kind]) for kind in KINDS if kind in self.kinds)
            return f"{self.failed} FAILED{notes}"
        if not self.passed:
            labels = {IN_TABLES.get(reason, "unsupported") for reason in self.skipped}
            return f"{' '.join(sorted(labels))}{notes}"
        if self.storage:
            notes += footnote.mark("storage accuracy: right if each intermediate is rounded to the dtype")
        return f"{self.worst:.2f} {short(self.examples):>5} {self.seconds:>3.0f}s{notes}"


class Footnotes:
    """Numbered reasons, in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, reason: str) -> str:
        """Return the reason's mark, such as ``[1]``."""
        return f"[{self._numbers.setdefault(reason, len(self._numbers) + 1)}]"

    def __iter__(self) -> Iterator[str]:
        return (f"[{number}] {reason}" for reason, number in self._numbers.items())


def short(count: int) -> str:
    """Format a count in at most five characters."""
    if count < 100_000:
        return str(count)
    return f"{count / 1e3:.0f}k" if count < 1e7 else f"{count / 1e6:.0f}M"


class Matrix:
    """The tallies of all cells of a run."""

    def __init__(self) -> None:
        self.tallies: dict[Cell, Tally] = {}
        self._of_candidates: list[Outcome] = []

    def suggested_claim(self, passed: bool) -> str:
        """Return the claim for the run's candidates: see `Verdict.suggested_claim`."""
        boundary = Boundary()
        for cell, tally in self.tallies.items():
            boundary.update(tally.boundary if cell.backend == CANDIDATE else Boundary())
        return suggestion(self._of_candidates, boundary, passed)

    def add(self, cell: Cell, outcome: Outcome) -> None:
        """Count the outcome of a cell's test."""
        if cell.backend == CANDIDATE:
            self._of_candidates.append(outcome)
        self.tallies.setdefault(cell, Tally()).add(outcome, cell.backend == CANDIDATE)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table, one operation below the other."""
        footnotes = Footnotes()
        backends = unique(cell.backend for cell in self.tallies)
        backends.sort(key=(*BACKENDS, CANDIDATE).index)
        rows = []
        for operation in sorted(unique(cell.operation for cell in self.tallies)):
            dtypes = [name for name in DTYPES if any(Cell(operation, b, name) in self.tallies for b in backends)]
            rows.append([operation, *dtypes])
            for backend in backends:
                cells = [self.tallies.get(Cell(operation, backend, name)) for name in dtypes]
                if any(cells):
                    rows.append([f"  {backend}", *(tally.show(footnotes) if tally else "" for tally in cells)])
        yield from table_lines(rows)
        yield from footnotes
        yield from self._remarks()
        examples = sum(tally.examples for tally in self.tallies.values())
        yield f"{examples} examples; in each cell: worst error over its bound, examples, seconds"

    def _remarks(self) -> Iterator[str]:
        """Yield the constants that sizes come from, the refusals, remarks and warnings."""
        yield from unique(f"{c.operation}: {tally.constants}" for c, tally in self.tallies.items() if tally.constants)
        for cell, tally in self.tallies.items():
            for line in refusal_lines(tally.refusals, tally.examples, tally.boundary.claim()):
                yield f"{cell}: {line}"
            yield from (f"{cell}: {remark}" for remark in tally.remarks)
            yield from (f"{cell}: warning: {warning}" for warning in tally.warnings[:SHOWN])
            if len(tally.warnings) > SHOWN:
                yield f"{cell}: warning: and {len(tally.warnings) - SHOWN} more"


def unique(names: Iterable[str]) -> list[str]:
    """Return distinct names in the order of their first occurrence."""
    return list(dict.fromkeys(names))
