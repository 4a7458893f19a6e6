"""A result depends on the values of the inputs at the call, and on nothing that happened before or elsewhere."""

import pytest

from fourfold.checks.history import history_does_not_matter, late_inputs_are_waited_for
from fourfold.checks.many_calls import each_of_many_calls_is_alike
from fourfold.checks.search import Search, Subject


@pytest.mark.check("history")
def test_history_does_not_matter(subject: Subject, search: Search) -> None:
    history_does_not_matter(subject, search)


@pytest.mark.check("many calls")
def test_each_of_many_calls_is_alike(subject: Subject, search: Search) -> None:
    each_of_many_calls_is_alike(subject, search)


@pytest.mark.check("late inputs")
def test_inputs_that_come_late_on_a_stream_are_waited_for(subject: Subject, search: Search) -> None:
    late_inputs_are_waited_for(subject, search)
