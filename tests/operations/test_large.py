"""Tensors may have more elements, and larger offsets, than 32 bits can count."""

import pytest

from fourfold.checks.batches import many_samples_are_alike
from fourfold.checks.search import Search, Subject
from fourfold.pytest_plugin.checks import check_test

# The largest extent of a CUDA grid along its second and third axis.
GRID_LIMIT = 65_535

test_offsets_may_pass_32_bits = check_test("offsets")


@pytest.mark.only(devices=["cuda"], dtypes=["float16", "float32"], batched=True)
def test_samples_may_be_more_than_a_grid_has_blocks_along_an_axis(subject: Subject, search: Search) -> None:
    many_samples_are_alike(subject, search, samples=GRID_LIMIT + 1)


# Processes wait for one another here, as each case takes a good part of the memory of a GPU.
@pytest.mark.full
@pytest.mark.only(devices=["cuda"], dtypes=["float16"], batched=True)
def test_results_may_have_more_than_2_31_elements(subject: Subject, search: Search) -> None:
    search.examples = 1
    many_samples_are_alike(subject, search, results=2**31)
