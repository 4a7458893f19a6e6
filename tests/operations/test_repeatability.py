"""The same call gives the same bits."""

from fourfold.pytest_plugin.checks import check_test

test_two_calls_give_the_same_bits = check_test("repeatability")
