"""The output of every implementation agrees with the oracle's within its running error."""

import pytest

from fourfold.checks import checks
from fourfold.checks.checks import Search, Subject


@pytest.mark.decisive
def test_output_agrees_with_the_oracle(subject: Subject, search: Search) -> None:
    checks.forward_agrees(subject, search)
