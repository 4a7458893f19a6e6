"""Hypothesis's private parts: the text of a failure, the limit of shrinking, and constants of loaded modules."""

import contextlib
import re
from collections.abc import Iterator

from hypothesis.internal.conjecture import engine, providers

from fourfold.compat import uses


@uses("hypothesis.internal.conjecture.providers._get_local_constants")
def ignore_local_constants() -> None:
    """Keep Hypothesis from drawing constants of the loaded modules' sources.

    Otherwise the cases of one seed depend on what else its process has imported. No setting does that.
    """
    none = providers.Constants()
    providers._get_local_constants = lambda: none


@contextlib.contextmanager
@uses("hypothesis.internal.conjecture.engine.MAX_SHRINKS")
def shrinking_at_most(times: int) -> Iterator[None]:
    """Limit how often Hypothesis makes a failing case smaller inside the block. No setting does that."""
    former, engine.MAX_SHRINKS = engine.MAX_SHRINKS, times
    try:
        yield
    finally:
        engine.MAX_SHRINKS = former


@uses("hypothesis.reproduce_failure in a failure's notes")
def find_blob(notes: str) -> str | None:
    """Return the blob that reproduces a failing case, from the line ``@reproduce_failure('6.170.0', b'AXic...')``.

    With `print_blob` Hypothesis adds the line to a failure's notes; no attribute contains it.
    """
    match = re.search(r"@reproduce_failure\('[^']*', b'([^']*)'\)", notes)
    return match[1] if match else None
