"""Inputs may lie in one storage, overlap, or be one tensor."""

import pytest

from fourfold.checks.search import Search, Subject
from fourfold.checks.sharing import inputs_may_share_memory


@pytest.mark.check("sharing")
def test_inputs_may_share_memory(subject: Subject, search: Search) -> None:
    inputs_may_share_memory(subject, search)
