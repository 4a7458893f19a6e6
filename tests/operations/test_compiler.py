"""Triton's compiler accepts the kernels that its interpreter runs."""

import pytest

from fourfold.engine.cells import CANDIDATE
from fourfold.pytest_plugin.checks import check_test

# Its front end reads what all small named examples launch; test_ahead_of_time.py compiles a few launches whole.
test_the_compiler_accepts_the_kernels = pytest.mark.only(backends=[CANDIDATE, "triton"])(check_test("compiler"))
