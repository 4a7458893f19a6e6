"""Kernels compute their results themselves, without torch's operators."""

import pytest

from fourfold.checks.catalogue import FALLBACK
from fourfold.checks.search import Search, Subject


# A half type is among them because an implementation may convert it.
@pytest.mark.only(kernels=True, dtypes=FALLBACK.dtypes)
def test_nothing_is_left_to_torch(subject: Subject, search: Search) -> None:
    FALLBACK.judge(subject, search)
