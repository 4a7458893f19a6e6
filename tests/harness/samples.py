"""Parameters of tests that the default profile runs for a few values, and the profiles full and nightly for all."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], *plain: Any) -> list[Any]:
    """Return the values, those that are not `plain` marked `full`."""
    return [value if value in plain else pytest.param(value, marks=pytest.mark.full) for value in values]
