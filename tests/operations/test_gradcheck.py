"""Every implementation's gradient is the derivative of its own output."""

import pytest

from fourfold.checks.gradcheck import gradcheck
from fourfold.checks.search import Search, Subject


@pytest.mark.check("gradcheck")
def test_gradient_is_the_derivative_of_the_output(subject: Subject, search: Search) -> None:
    gradcheck(subject, search)
