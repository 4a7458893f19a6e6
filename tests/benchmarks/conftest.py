"""What benchmarks take."""

import pytest

from properties.performance.plugin import Performance


@pytest.fixture(scope="session")
def performance(pytestconfig: pytest.Config) -> Performance:
    return pytestconfig.pluginmanager.getplugin("fourfold-performance")
