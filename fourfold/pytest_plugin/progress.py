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
        former: the seconds of each test in its last run, by name.
        workers: the number of workers.
        clock: a clock, in seconds.
    """

    def __init__(self, former: dict[str, float], workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.former, self.workers, self.clock = former, workers, clock
        self.remaining: dict[str, None] = {}
        self.total = 0
        self.seconds: dict[str, float] = {}
        self.failed = 0
        self.last_report = clock()

    def expect(self, names: Iterable[str]) -> None:
        """Set the tests that are about to run."""
        self.remaining = dict.fromkeys(names)
        self.total = len(self.remaining)

    def took(self, name: str, seconds: float, failed: bool) -> None:
        """Add the duration of a phase of a test: its setup, call or teardown."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.failed += failed

    def finish(self, name: str) -> str | None:
        """Remove a finished test; return a progress line if one is due."""
        self.remaining.pop(name, None)
        if not self.remaining or self.clock() - self.last_report < SECONDS_BETWEEN:
            return None
        self.last_report = self.clock()
        failures = f", {self.failed} failed" if self.failed else ""
        progress = f"{self.total - len(self.remaining)} of {self.total} tests{failures}"
        return f"[{progress}; {format_duration(self.seconds_left())} to go; {name.rpartition('::')[2]}]"

    def seconds_left(self) -> float:
        """Return the seconds until the end; a test of unknown duration counts as an average one of this run."""
        average = sum(self.seconds.values()) / max(len(self.seconds), 1)
        # A busier or a different machine slows all tests alike.
        common = [name for name in self.seconds if name in self.former]
        former, today = (sum(seconds[name] for name in common) for seconds in (self.former, self.seconds))
        pace = today / former if former else 1.0
        ahead = sum(self.former[name] * pace if name in self.former else average for name in self.remaining)
        return ahead / self.workers


def format_duration(seconds: float) -> str:
    """Format a time in minutes and seconds."""
    minutes, seconds_left = divmod(round(seconds), 60)
    return f"{minutes} min {seconds_left:02} s" if minutes else f"{seconds_left} s"


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
        if not self.progress.seconds:
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
        if self.cache and self.progress.seconds:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # if nothing can be stored, the next run has no forecast
                self.cache.set(_CACHED, {**self.progress.former, **self.progress.seconds})
