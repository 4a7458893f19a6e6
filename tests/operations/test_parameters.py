"""Parameters may be left out, and may be anywhere in their range."""

import pytest

from fourfold.checks.parameters import defaults_are_the_definitions, parameters_may_be_far_from_the_usual
from fourfold.checks.search import Search, Subject


@pytest.mark.check("defaults")
def test_a_parameter_left_out_is_the_definitions_default(subject: Subject, search: Search) -> None:
    defaults_are_the_definitions(subject, search)


@pytest.mark.check("parameters")
def test_parameters_may_be_far_from_the_usual(subject: Subject, search: Search) -> None:
    parameters_may_be_far_from_the_usual(subject, search)
