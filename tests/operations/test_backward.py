"""The gradients of every implementation agree with the oracle's within their running error, together and alone."""

from fourfold.pytest_plugin.checks import check_test

test_gradients_agree_with_the_oracle = check_test("backward")
test_gradient_alone_is_the_one_taken_together = check_test("single gradients")
