"""The gradient is that of the call's values, whatever is written into its tensors before the backward pass."""

import pytest

from fourfold.checks.saved_tensors import backward_is_of_the_call
from fourfold.checks.search import Search, Subject


@pytest.mark.check("saved tensors")
def test_what_backward_reads_is_guarded_or_kept(subject: Subject, search: Search) -> None:
    backward_is_of_the_call(subject, search)
