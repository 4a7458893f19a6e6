"""Hypothesis's private parts: the text that it adds to a failure."""

import re

from fourfold.compat import uses


@uses("hypothesis.reproduce_failure in a failure's notes")
def blob_in(notes: str) -> str | None:
    """Return the blob that reproduces a failing case, from the line ``@reproduce_failure('6.170.0', b'AXic...')``.

    With `print_blob` Hypothesis adds the line to a failure's notes; no attribute contains it.
    """
    found = re.search(r"@reproduce_failure\('[^']*', b'([^']*)'\)", notes)
    return found[1] if found else None


@uses("hypothesis.given naming arguments in a failure's notes")
def argument_in(notes: str, name: str, kind: str) -> str | None:
    """Return the one-line representation of an argument, like ``case=Case(...)``, from a failure's notes.

    Args:
        notes: of the failure.
        name: of the argument.
        kind: the name of its type.
    """
    found = re.search(rf"^\s*{name}=({kind}\(.*\))", notes, re.MULTILINE)
    return found[1] if found else None
