"""How long a run of minutes will take: a line now and then, from what the tests took last time; and each failure."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from fourfold.compat import pytest_internals

# Between two lines, and before the first.
SECONDS_BETWEEN = 30.0
# Characters of a failure's reason.
SHOWN = 300
_CACHED = "fourfold/seconds"


class Progress:
    """The plugin of the process that reports.

    Args:
        known: seconds of each test, by name, when it was last run.
        workers: how many run tests at once.
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
        """These are going to be run."""
        self.remaining = dict.fromkeys(names)
        self.total = len(self.remaining)

    def took(self, name: str, seconds: float, failed: bool) -> None:
        """A part of one was run: its setup, its call or what follows."""
        self.seen[name] = self.seen.get(name, 0.0) + seconds
        self.failed += failed

    def ended(self, name: str) -> str | None:
        """One is over; gives a line, if it is time for one."""
        self.remaining.pop(name, None)
        if not self.remaining or self.now() - self.told < SECONDS_BETWEEN:
            return None
        self.told = self.now()
        failures = f", {self.failed} failed" if self.failed else ""
        done = f"{self.total - len(self.remaining)} of {self.total} tests{failures}"
        return f"[{done}; {spelled(self.left())} to go; {name.rpartition('::')[2]}]"

    def left(self) -> float:
        """Seconds until the end: what is not known takes as long as an average one of this run."""
        average = sum(self.seen.values()) / max(len(self.seen), 1)
        # A machine that is busier, or another, is so for all tests alike.
        both = [name for name in self.seen if name in self.known]
        before, today = (sum(of[name] for name in both) for of in (self.known, self.seen))
        pace = today / before if before else 1.0
        ahead = sum(self.known[name] * pace if name in self.known else average for name in self.remaining)
        return ahead / self.workers


def spelled(seconds: float) -> str:
    """A time in minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def reason(report: Any) -> str:
    """Why a test failed, in a line."""
    lines = pytest_internals.message_of(report).strip().splitlines() or [""]
    return lines[0][:SHOWN]


class ProgressReporter:
    """Hooks of pytest and pytest-xdist that feed a `Progress`."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.cache = getattr(config, "cache", None)
        self.progress = Progress(dict(self.cache.get(_CACHED, {})) if self.cache else {}, workers=1)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without workers the tests are known here."""
        self.progress.expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        """With workers, so many run tests at once."""
        self.progress.workers = len(specs)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        """With them, each tells the same."""
        if not self.progress.seen:
            self.progress.expect(ids)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        """Tell how far it is, if it has been a while."""
        self.progress.took(report.nodeid, report.duration, report.failed)
        line = self.progress.ended(report.nodeid) if report.when == "teardown" else None
        if report.failed:
            # At once, too: what ends a long run may keep it from its summary.
            line = f"[{report.nodeid} failed: {reason(report)}]"
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        if line and reporter and self.config.get_verbosity() >= 0:
            reporter.write(f"\n{line}\n")

    def pytest_sessionfinish(self) -> None:
        """Keep what the tests took."""
        if self.cache and self.progress.seen:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # where nothing can be kept, the next run has no forecast
                self.cache.set(_CACHED, {**self.progress.known, **self.progress.seen})
