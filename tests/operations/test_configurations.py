"""Every configuration of a tuned kernel, not only its default, agrees with the oracle."""

import pytest
import torch

from fourfold.backends import tuning
from fourfold.checks.backward import backward_agrees
from fourfold.checks.forward import forward_agrees
from fourfold.checks.search import Search, Subject
from fourfold.running.cells import Cell


@pytest.mark.only(tuned=True)
def test_every_configuration_agrees_with_the_oracle(
    subject: Subject, cell: Cell, search: Search, device: str, request: pytest.FixtureRequest
) -> None:
    kernel = f"{cell.operation}_{cell.backend}"
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    not_run = {}
    # The named examples reach every configuration; a few generated cases beside them are enough.
    search.examples = min(search.examples, 5)
    for configuration in tuning.configurations(kernel):
        if not configuration.runs_on(where):
            not_run[configuration.name] = f"needs {configuration.needs}"
            continue
        if subject.dtype.torch not in configuration.dtypes:
            continue
        with tuning.forced(kernel, configuration.name) as forced:
            forward_agrees(subject, search)
            if device == "cuda":  # by the same kernels, which are slow if they are interpreted
                backward_agrees(subject, search)
        assert forced.launches, f"no case is one that {configuration.name} can do"
    request.node.user_properties.append(("configurations not run", not_run))
