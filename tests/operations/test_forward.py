"""The output of every implementation agrees with the oracle's within its running error."""

import pytest

from fourfold.pytest_plugin.checks import check_test

test_output_agrees_with_the_oracle = pytest.mark.decisive(check_test("forward"))
