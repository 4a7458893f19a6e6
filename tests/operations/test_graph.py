"""The gradients of a call are its own, whenever its backward pass runs and wherever it stands in autograd's graph."""

from fourfold.pytest_plugin.checks import check_test

test_backward_passes_may_interleave = check_test("interleaving")
test_place_in_the_graph_does_not_matter = check_test("graph")
