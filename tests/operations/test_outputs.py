"""The outputs of one call have to do with one another what the record says."""

import pytest

from fourfold.checks.outputs import outputs_fit
from fourfold.checks.search import Search, Subject


@pytest.mark.check("outputs together")
def test_outputs_of_a_call_fit_one_another(subject: Subject, search: Search) -> None:
    outputs_fit(subject, search)
