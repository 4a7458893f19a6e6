"""The gradients of a call are its own, whenever its backward pass runs and wherever it stands in autograd's graph."""

import pytest

from fourfold.checks.graph import place_in_the_graph_does_not_matter
from fourfold.checks.interleaving import backward_passes_may_interleave
from fourfold.checks.search import Search, Subject


@pytest.mark.check("interleaving")
def test_backward_passes_may_interleave(subject: Subject, search: Search) -> None:
    backward_passes_may_interleave(subject, search)


@pytest.mark.check("graph")
def test_place_in_the_graph_does_not_matter(subject: Subject, search: Search) -> None:
    place_in_the_graph_does_not_matter(subject, search)
