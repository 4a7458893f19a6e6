"""The gradient is that of the call's values, whatever is written into its tensors before the backward pass."""

from fourfold.pytest_plugin.checks import check_test

test_what_backward_reads_is_guarded_or_kept = check_test("saved tensors")
