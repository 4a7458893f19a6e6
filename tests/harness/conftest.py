"""Fixtures for all tests of the harness."""

import pytest
from one_run import keep_results_in

from fourfold.backends.triton import takeover
from fourfold.compat import xdist_internals


@pytest.fixture(autouse=True, scope="session")
def _shared_results(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep results of `one_run` in the folder of the whole run, which contains each worker's folder."""
    folder = tmp_path_factory.getbasetemp()
    keep_results_in(folder.parent if xdist_internals.is_worker(pytestconfig) else folder)


@pytest.fixture
def on_the_cpu(device: str) -> None:
    """Skip on a GPU: verifying on the CPU makes the process interpret all Triton kernels."""
    if device != "cpu":
        pytest.skip("needs --device cpu")


@pytest.fixture
def gpu(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs --device cuda")


@pytest.fixture
def interpreted() -> None:
    if not takeover.is_interpreting():
        pytest.skip("kernels are not interpreted")
