"""pytest's private parts: what its reports hold, how it ends a session, where its own code lies."""

import functools
import inspect
from pathlib import Path
from typing import Any, NoReturn

import pluggy
import pytest

from fourfold.compat import uses


@uses("pytest.Session.Failed")
def stop(session: pytest.Session, reason: str) -> NoReturn:
    """Run no further test of a session, from within a hook; it has failed then, as by ``-x``.

    ``session.shouldfail`` is looked at after the next test, and ``pytest.exit`` gives another exit code.
    """
    raise session.Failed(reason)


@uses("pytest.TestReport().longrepr.reprcrash")
def message_of(report: Any) -> str:
    """What a failed report says: the exception's message, or all of the report where there is no exception.

    `longrepr` is documented, its attributes are not. Without them the traceback comes first.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longrepr)


@uses("pytest.TestReport().longrepr[2]")
def skip_reason_of(report: Any) -> str:
    """Why a test was skipped. The report holds a path, a line and the reason, or text."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple | list) else report.longreprtext
    return str(why).removeprefix("Skipped: ")


@functools.cache
def _folders() -> tuple[str, ...]:
    return tuple(str(Path(inspect.getfile(owner)).parent) for owner in (pytest.Item, pluggy.PluginManager))


def is_own_frame(line: str) -> bool:
    """Whether a line of a traceback names a file of pytest's own code, or of what calls its hooks."""
    return any(f'"{folder}/' in line for folder in _folders())
