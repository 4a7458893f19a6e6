"""A call reads and writes nothing outside of its tensors, and writes its results in full."""

from fourfold.pytest_plugin.checks import check_test

test_only_what_was_given_is_touched = check_test("memory")
