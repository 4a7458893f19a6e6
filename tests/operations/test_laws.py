"""The implementation's own results satisfy the laws of the operation."""

import pytest

from fourfold.checks.laws import law_holds
from fourfold.checks.search import Search, Subject
from fourfold.operations.record import Law


@pytest.mark.check("law")
def test_law_holds(subject: Subject, law: Law, search: Search) -> None:
    law_holds(law, subject, search)
