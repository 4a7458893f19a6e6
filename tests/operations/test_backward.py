"""The gradients of every implementation agree with the oracle's within their running error, together and alone."""

import pytest

from fourfold.checks import checks
from fourfold.checks.checks import Search, Subject


def test_gradients_agree_with_the_oracle(subject: Subject, search: Search) -> None:
    checks.backward_agrees(subject, search)


# The gradients that are asked for decide which work is left out, in the same way for every dtype.
@pytest.mark.mostly("float16", "float32")
def test_gradient_alone_is_the_one_taken_together(subject: Subject, search: Search) -> None:
    checks.single_gradients_agree(subject, search)
