"""Triton's compiler accepts the kernels of a candidate that its interpreter runs."""

import pytest

from fourfold.engine.cells import CANDIDATE
from fourfold.pytest_plugin.checks import check_test

# This library's own kernels are compiled whole: see test_ahead_of_time.py.
test_the_compiler_accepts_the_kernels = pytest.mark.only(backends=[CANDIDATE])(check_test("compiler"))
