"""Inputs may lie in one storage, overlap, or be one tensor."""

from fourfold.pytest_plugin.checks import check_test

test_inputs_may_share_memory = check_test("sharing")
