"""Kernels compute their results themselves, without torch's operators."""

import pytest

from fourfold.checks.fallback import nothing_is_left_to_torch
from fourfold.checks.search import Search, Subject


# A half type is among them because an implementation may convert it.
@pytest.mark.only(kernels=True, dtypes=["bfloat16", "float32"])
def test_nothing_is_left_to_torch(subject: Subject, search: Search) -> None:
    # The operators that are called depend on shapes and layouts more than on values: a few cases show them.
    search.examples = min(search.examples, 10)
    nothing_is_left_to_torch(subject, search)
