"""A sample's results do not depend on the batch around it."""

import pytest

from fourfold.checks.batches import the_batch_does_not_matter
from fourfold.checks.search import Search, Subject


@pytest.mark.check("batch")
def test_a_sample_gives_the_same_in_every_batch(subject: Subject, search: Search) -> None:
    the_batch_does_not_matter(subject, search)
