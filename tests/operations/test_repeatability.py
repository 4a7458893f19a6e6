"""The same call gives the same bits."""

from properties import checks
from properties.checks import Search, Subject


def test_two_calls_give_the_same_bits(subject: Subject, search: Search) -> None:
    checks.repeats_bit_for_bit(subject, search)
