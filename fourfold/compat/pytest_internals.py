"""pytest's private parts: the contents of its reports, the end of a session, and the location of its own code."""

import functools
import inspect
from pathlib import Path
from typing import Any, NoReturn

import pluggy
import pytest

from fourfold.compat import uses


@uses("pytest.Session.Failed")
def stop(session: pytest.Session, reason: str) -> NoReturn:
    """Stop a session from within a hook and mark it as failed, like ``-x``.

    ``session.shouldfail`` takes effect only after the next test, and ``pytest.exit`` gives another exit code.
    """
    raise session.Failed(reason)


@uses("pytest.TestReport().longrepr.reprcrash")
def message_of(report: Any) -> str:
    """Return the message of a failed report's exception, or the whole report if there is no exception.

    `longrepr` is documented, its attributes are not. Without them the traceback comes first.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longrepr)


@uses("pytest.TestReport().longrepr[2]")
def skip_reason_of(report: Any) -> str:
    """Return the reason why a test was skipped. The report holds a path, a line and the reason, or text."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple | list) else report.longreprtext
    return str(reason).removeprefix("Skipped: ")


@functools.cache
def _folders() -> tuple[str, ...]:
    return tuple(str(Path(inspect.getfile(owner)).parent) for owner in (pytest.Item, pluggy.PluginManager))


def is_own_frame(line: str) -> bool:
    """Return whether a line of a traceback names a file of pytest, or of a package that calls its hooks."""
    return any(f'"{folder}/' in line for folder in _folders())
