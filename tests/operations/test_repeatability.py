"""The same call gives the same bits."""

import pytest

from fourfold.checks.repeatability import repeats_bit_for_bit
from fourfold.checks.search import Search, Subject


# The order of a sum is the same in every dtype.
@pytest.mark.mostly("float16", "float32")
def test_two_calls_give_the_same_bits(subject: Subject, search: Search) -> None:
    repeats_bit_for_bit(subject, search)
