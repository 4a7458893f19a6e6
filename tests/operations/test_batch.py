"""A sample's results do not depend on the batch around it."""

from fourfold.pytest_plugin.checks import check_test

test_a_sample_gives_the_same_in_every_batch = check_test("batch")
