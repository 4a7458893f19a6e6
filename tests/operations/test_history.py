"""A result depends on the values of the inputs at the call, and on nothing that happened before or elsewhere."""

from fourfold.pytest_plugin.checks import check_test

test_history_does_not_matter = check_test("history")
test_each_of_many_calls_is_alike = check_test("many calls")
test_inputs_that_come_late_on_a_stream_are_waited_for = check_test("late inputs")
