"""The same call gives the same bits."""

import pytest

from fourfold.checks.repeatability import repeats_bit_for_bit
from fourfold.checks.search import Search, Subject


@pytest.mark.check("repeatability")
def test_two_calls_give_the_same_bits(subject: Subject, search: Search) -> None:
    repeats_bit_for_bit(subject, search)
