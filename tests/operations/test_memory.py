"""Nothing outside of the tensors of a call is read or written, and results are written in full."""

from properties import checks
from properties.checks import Search, Subject


def test_only_what_was_given_is_touched(subject: Subject, search: Search) -> None:
    checks.memory_is_respected(subject, search)
