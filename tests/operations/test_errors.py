"""Bad input raises an error that names the argument."""

import pytest

from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.search import Search, Subject


@pytest.mark.check("bad input")
def test_bad_input_raises_a_declared_error(subject: Subject, search: Search) -> None:
    declared_errors_are_raised(subject, search)
