"""The tests of the catalogue's checks, one for each cell."""

from collections.abc import Callable

import pytest

from fourfold.checks.catalogue import check_named
from fourfold.checks.search import Search, Subject


def check_test(name: str) -> Callable[..., None]:
    """Return the test that makes a check of the catalogue, by its name."""
    judge = check_named(name).judge

    def test(subject: Subject, search: Search) -> None:
        judge(subject, search)

    return pytest.mark.check(name)(test)
