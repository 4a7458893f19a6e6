"""Threads that call at once get what each of them gets alone."""

import pytest

from fourfold.checks.search import Search, Subject
from fourfold.checks.threads import threads_do_not_matter


@pytest.mark.check("threads")
def test_threads_do_not_matter(subject: Subject, search: Search) -> None:
    threads_do_not_matter(subject, search)
