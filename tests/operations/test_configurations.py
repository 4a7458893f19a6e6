"""Every configuration of a tuned kernel, not only its default, agrees with the oracle."""

import pytest

from fourfold.backends.tuning import Configuration
from fourfold.checks.configurations import configuration_agrees
from fourfold.checks.search import Search, Subject


@pytest.mark.check("configuration")
def test_configuration_agrees_with_the_oracle(subject: Subject, configuration: Configuration, search: Search) -> None:
    configuration_agrees(configuration, subject, search)
