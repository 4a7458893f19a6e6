"""Kernels compute what they are named for themselves."""

import pytest

from properties import checks
from properties.checks import Search, Subject


# Half types may be converted on the way.
@pytest.mark.only(kernels=True, dtypes=["bfloat16", "float32"])
def test_nothing_is_left_to_torch(subject: Subject, search: Search) -> None:
    # Which operators are called depends on shapes and layouts more than on values: a few cases show it.
    search.examples = min(search.examples, 10)
    checks.nothing_is_left_to_torch(subject, search)
