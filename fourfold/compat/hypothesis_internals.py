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
