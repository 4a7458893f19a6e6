"""The gradients of every implementation agree with the oracle's within their running error, together and alone."""

import pytest

from fourfold.checks.backward import backward_agrees
from fourfold.checks.search import Search, Subject
from fourfold.checks.single_gradients import single_gradients_agree


@pytest.mark.check("backward")
def test_gradients_agree_with_the_oracle(subject: Subject, search: Search) -> None:
    backward_agrees(subject, search)


@pytest.mark.check("single gradients")
def test_gradient_alone_is_the_one_taken_together(subject: Subject, search: Search) -> None:
    single_gradients_agree(subject, search)
