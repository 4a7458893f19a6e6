"""A plugin for runs of pytest with time limits that are never reached: a kernel says when they are over.

So the run does not depend on the clock. The limits are those that the run has set, and end it as they would.
"""

import signal

from fourfold.pytest_plugin.black_box import BlackBox

# Gives what sets the limit time to return to its kernel.
SOON = 0.05
_watching: list[BlackBox] = []
_expect_within = BlackBox.expect_within


def _remember(box: BlackBox, seconds: float) -> None:
    _watching[:] = [box]
    _expect_within(box, seconds)


BlackBox.expect_within = _remember  # type: ignore[method-assign]


def interrupt() -> None:
    """Let the limit be over after which Python is interrupted."""
    signal.setitimer(signal.ITIMER_REAL, SOON)


def end() -> None:
    """Let the limit be over after which the process is ended."""
    _watching[0].expect_within(SOON)
