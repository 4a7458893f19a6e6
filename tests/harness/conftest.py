"""Fixtures for all tests of the harness."""

import pytest
from one_run import keep_results_in


@pytest.fixture(autouse=True, scope="session")
def _shared_results(worker_id: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep results of `one_run` in the folder of the whole run: that of a worker lies in it."""
    folder = tmp_path_factory.getbasetemp()
    keep_results_in(folder if worker_id == "master" else folder.parent)
