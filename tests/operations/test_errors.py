"""Bad input raises an error that names the argument."""

import pytest

from properties import checks
from properties.checks import Search, Subject


# The checks of arguments come before anything that depends on the dtype.
@pytest.mark.only(dtypes=["float32"])
def test_bad_input_raises_a_declared_error(subject: Subject, search: Search) -> None:
    checks.declared_errors_are_raised(subject, search)
