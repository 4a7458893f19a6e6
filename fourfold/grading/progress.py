"""The display of a run: a progress bar with counts, and a table that closes it."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fourfold.grading.results import Graded
from fourfold.operations.outcomes import Kind

# The number of latest failures, and of slowest candidates, in the display.
SHOWN = 5
# Seconds between two lines without a terminal.
BETWEEN_LINES = 30.0
# The number of characters of a failure.
WIDTH = 110


class ProgressDisplay:
    """The progress display of a run.

    Args:
        total: the number of candidates; None if unknown.
        console: the console that shows it.
    """

    def __init__(self, total: int | None, console: Console) -> None:
        self.total, self.console = total, console
        self.counts: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.latest: deque[Graded] = deque(maxlen=SHOWN)
        self.slowest: list[Graded] = []
        self.start = self.last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("to go"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self._bar.add_task("graded", total=total, rate="")
        self._live = Live(self._bar, console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._live:
            self._live.stop()

    def track(self, graded: Iterable[Graded]) -> Iterator[Graded]:
        """Count and yield each verdict."""
        for verdict in graded:
            self.saw(verdict)
            yield verdict

    def saw(self, verdict: Graded) -> None:
        """Count a verdict."""
        self.counts[verdict.kind] += 1
        if not verdict.same_as:
            self.seconds.append(verdict.seconds)
            self.slowest = sorted([*self.slowest, verdict], key=lambda v: -v.seconds)[:SHOWN]
        if verdict.failures:
            self.latest.append(verdict)
        self._bar.update(self._task, advance=1, rate=f"{self.rate:.0f} a minute")
        if self._live:
            self._live.update(Group(self._bar, self.line(), *map(describe_failure, self.latest)))
        elif time.monotonic() - self.last_line > BETWEEN_LINES:
            self.last_line = time.monotonic()
            self.console.print(escape(f"[{self.line()}; {self.rate:.0f} a minute]"), soft_wrap=True)

    @property
    def rate(self) -> float:
        """Return the number of candidates a minute."""
        return 60 * self.counts.total() / max(time.monotonic() - self.start, 1e-3)

    def line(self) -> str:
        """Return the counts in a line."""
        of_total = f" of {self.total}" if self.total is not None else ""
        return f"{self.counts.total()}{of_total} graded: " + ", ".join(
            f"{n} {kind}" for kind, n in self._nonzero_counts()
        )

    def _nonzero_counts(self) -> list[tuple[str, int]]:
        return [(kind, self.counts[kind]) for kind in Kind if self.counts[kind]]

    def closing(self) -> Table:
        """Return the table that closes a run."""
        table = Table(title=f"{self.counts.total()} candidates", title_justify="left", box=None)
        table.add_column("verdict")
        table.add_column("candidates", justify="right")
        table.add_column("share", justify="right")
        for kind, count in self._nonzero_counts():
            table.add_row(kind, str(count), f"{count / self.counts.total():.1%}")
        return table

    def tell(self) -> None:
        """Print the summary that closes a run."""
        self.console.print(self.closing())
        if self.seconds:
            times = sorted(self.seconds)
            middle, late = times[len(times) // 2], times[min(len(times) - 1, int(0.95 * len(times)))]
            seconds = time.monotonic() - self.start
            self.console.print(
                f"{len(times)} judged in {seconds:.0f} s, {60 * len(times) / max(seconds, 1e-3):.1f} a minute;"
                f" seconds a candidate: {middle:.1f} in the median, 95% within {late:.1f}",
                soft_wrap=True,
            )
        if len(self.slowest) > 1:
            self.console.print("slowest: " + ", ".join(f"{v.id} {v.seconds:.0f} s" for v in self.slowest))
        if self.latest:
            self.console.print("latest failures:")
        for verdict in self.latest:
            self.console.print(escape(describe_failure(verdict)), soft_wrap=True)


def describe_failure(verdict: Graded) -> str:
    """Describe a failure in a line."""
    message = verdict.failures[0][1].message.strip().partition("\n")[0]
    return f"  {verdict.id}: {verdict.kind}: {message}"[:WIDTH]
