"""A call reads and writes nothing outside of its tensors, and writes its results in full."""

import pytest

from fourfold.checks.memory import memory_is_respected
from fourfold.checks.search import Search, Subject


@pytest.mark.check("memory")
def test_only_what_was_given_is_touched(subject: Subject, search: Search) -> None:
    memory_is_respected(subject, search)
