"""The output of every implementation agrees with the oracle's within its running error."""

import pytest

from fourfold.checks.forward import forward_agrees
from fourfold.checks.search import Search, Subject


@pytest.mark.check("forward")
@pytest.mark.decisive
def test_output_agrees_with_the_oracle(subject: Subject, search: Search) -> None:
    forward_agrees(subject, search)
