"""Progress of a long run: a forecast now and then, from the last durations of the tests, and each failure."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from fourfold.compat import pytest_internals

# Seconds between two lines, and before the first.
SECONDS_BETWEEN = 30.0
# The number of characters of a failure's reason.
SHOWN = 300
_CACHED = "fourfold/seconds"


class Progress:
    """The forecast of a run, in the process that reports.

    Args:
        known: the seconds of each test in its last run, by name.
        workers: the number of workers.
        now: a clock, in seconds.
    """

    def __init__(self, known: dict[str, float], workers: int, now: Callable[[], float] = time.monotonic) -> None:
        self.known, self.workers, self.now = known, workers, now
        self.remaining: dict[str, None] = {}
        self.total = 0
        self.seen: dict[str, float] = {}
        self.failed = 0
        self.told = now()

    def expect(self, names: Iterable[str]) -> None:
        """Set the tests that are about to run."""
        self.remaining = dict.fromkeys(names)
        self.total = len(self.remaining)

    def took(self, name: str, seconds: float, failed: bool) -> None:
        """Add the duration of a phase of a test: its setup, call or teardown."""
        self.seen[name] = self.seen.get(name, 0.0) + seconds
        self.failed += failed

    def finish(self, name: str) -> str | None:
        """Remove a finished test; return a progress line if one is due."""
        self.remaining.pop(name, None)
        if not self.remaining or self.now() - self.told < SECONDS_BETWEEN:
            return None
        self.told = self.now()
        failures = f", {self.failed} failed" if self.failed else ""
        progress = f"{self.total - len(self.remaining)} of {self.total} tests{failures}"
        return f"[{progress}; {format_duration(self.seconds_left())} to go; {name.rpartition('::')[2]}]"

    def seconds_left(self) -> float:
        """Return the seconds until the end; a test of unknown duration counts as an average one of this run."""
        average = sum(self.seen.values()) / max(len(self.seen), 1)
        # A busier or a different machine slows all tests alike.
        both = [name for name in self.seen if name in self.known]
        before, today = (sum(of[name] for name in both) for of in (self.known, self.seen))
        pace = today / before if before else 1.0
        ahead = sum(self.known[name] * pace if name in self.known else average for name in self.remaining)
        return ahead / self.workers


def format_duration(seconds: float) -> str:
    """Format a time in minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def reason(report: Any) -> str:
    """Return why a test failed, in a line."""
    lines = pytest_internals.message_of(report).strip().splitlines() or [""]
    return lines[0][:SHOWN]


class ProgressReporter:
    """Hooks of pytest and pytest-xdist that feed a `Progress`."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.cache = getattr(config, "cache", None)
        self.progress = Progress(dict(self.cache.get(_CACHED, {})) if self.cache else {}, workers=1)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Set the tests of a run without workers."""
        self.progress.expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        """Set the number of workers."""
        self.progress.workers = len(specs)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        """Set the tests of a run with workers, all of which collect the same."""
        if not self.progress.seen:
            self.progress.expect(ids)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        """Print a progress line if one is due, and each failure at once, except those that refer to another."""
        self.progress.took(report.nodeid, report.duration, report.failed)
        line = self.progress.finish(report.nodeid) if report.when == "teardown" else None
        if report.failed and not getattr(report, "refers", False):
            # Print failures at once, too: a long run may be cut off before its summary.
            line = f"[{report.nodeid} failed: {reason(report)}]"
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        if line and reporter and self.config.get_verbosity() >= 0:
            reporter.write(f"\n{line}\n")

    def pytest_sessionfinish(self) -> None:
        """Store the durations of the tests."""
        if self.cache and self.progress.seen:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # if nothing can be stored, the next run has no forecast
                self.cache.set(_CACHED, {**self.progress.known, **self.progress.seen})
