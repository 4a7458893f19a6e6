"""Every implementation's gradient is the derivative of its own output."""

from fourfold.pytest_plugin.checks import check_test

test_gradient_is_the_derivative_of_the_output = check_test("gradcheck")
