"""torch's modes change no result; autocast may change its precision."""

import pytest

from fourfold.checks.modes import autocast_changes_precision_alone, modes_do_not_matter
from fourfold.checks.search import Search, Subject


@pytest.mark.check("modes")
def test_modes_do_not_matter(subject: Subject, search: Search) -> None:
    modes_do_not_matter(subject, search)


@pytest.mark.check("autocast")
def test_autocast_changes_precision_alone(subject: Subject, search: Search) -> None:
    autocast_changes_precision_alone(subject, search)
