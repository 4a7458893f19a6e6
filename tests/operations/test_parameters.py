"""Parameters may be left out, and may be anywhere in their range."""

from fourfold.pytest_plugin.checks import check_test

test_a_parameter_left_out_is_the_definitions_default = check_test("defaults")
test_parameters_may_be_far_from_the_usual = check_test("parameters")
