"""The outputs of one call have to do with one another what the record says."""

from fourfold.pytest_plugin.checks import check_test

test_outputs_of_a_call_fit_one_another = check_test("outputs together")
