"""The same call gives the same bits."""

import pytest

from fourfold.checks import checks
from fourfold.checks.checks import Search, Subject


# The order of a sum is the same in every dtype.
@pytest.mark.mostly("float16", "float32")
def test_two_calls_give_the_same_bits(subject: Subject, search: Search) -> None:
    checks.repeats_bit_for_bit(subject, search)
