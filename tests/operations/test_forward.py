"""The output of every implementation is the oracle's, within its running error."""

from properties import checks
from properties.checks import Search, Subject


def test_output_agrees_with_the_oracle(subject: Subject, search: Search) -> None:
    checks.forward_agrees(subject, search)
