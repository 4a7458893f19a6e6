"""Tensors may be larger than 32 bits count."""

from collections.abc import Iterator

import pytest
import torch

from impls.cuda_compile import cache_directory, locked
from properties import checks
from properties.checks import Search, Subject
from properties.far_apart import NoRoom

# The second and third extents of a grid end there.
GRID_LIMIT = 65_535


@pytest.fixture(autouse=True)
def room(device: str) -> Iterator[None]:
    """On a GPU one process at a time takes gigabytes, and gives them back."""
    if device != "cuda":
        yield
        return
    with locked(cache_directory() / str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)):
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()


# Offsets are computed alike for all types.
@pytest.mark.only(dtypes=["float16", "float32"])
def test_offsets_may_pass_32_bits(subject: Subject, search: Search) -> None:
    try:
        checks.offsets_may_pass_32_bits(subject, search)
    except NoRoom as error:
        pytest.skip(str(error))


@pytest.mark.only(devices=["cuda"], dtypes=["float16", "float32"], batched=True)
def test_samples_may_be_more_than_a_grid_has_blocks_along_an_axis(subject: Subject, search: Search) -> None:
    checks.many_samples_are_alike(subject, search, samples=GRID_LIMIT + 1)


@pytest.mark.only(devices=["cuda"], dtypes=["float16"], batched=True)
def test_results_may_have_more_than_2_31_elements(subject: Subject, search: Search) -> None:
    search.examples = 1
    try:
        checks.many_samples_are_alike(subject, search, results=2**31)
    except NoRoom as error:
        pytest.skip(str(error))
