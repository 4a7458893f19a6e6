"""The gradients of every implementation are the oracle's, within their running error, together and alone."""

from properties import checks
from properties.checks import Search, Subject


def test_gradients_agree_with_the_oracle(subject: Subject, search: Search) -> None:
    checks.backward_agrees(subject, search)


def test_gradient_alone_is_the_one_taken_together(subject: Subject, search: Search) -> None:
    checks.single_gradients_agree(subject, search)
