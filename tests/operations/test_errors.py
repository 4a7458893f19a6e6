"""Bad input raises an error that names the argument."""

from fourfold.pytest_plugin.checks import check_test

test_bad_input_raises_a_declared_error = check_test("bad input")
