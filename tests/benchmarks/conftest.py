"""The fixtures of the benchmarks."""

import pytest

from fourfold.performance.plugin import Performance


@pytest.fixture(scope="session")
def performance(pytestconfig: pytest.Config) -> Performance:
    return pytestconfig.pluginmanager.getplugin("fourfold-performance")
