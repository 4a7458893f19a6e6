"""A sample's results do not depend on the batch around it."""

import pytest

from fourfold.checks import checks
from fourfold.checks.checks import Search, Subject


@pytest.mark.only(batched=True)
def test_a_sample_gives_the_same_in_every_batch(subject: Subject, search: Search) -> None:
    checks.the_batch_does_not_matter(subject, search)
