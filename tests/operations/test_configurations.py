"""Every configuration of a kernel that is tuned computes the same as its default: what the oracle does."""

import pytest
import torch

from impls import tuning
from properties import checks
from properties.cells import Cell
from properties.checks import Search, Subject


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
            checks.forward_agrees(subject, search)
            if device == "cuda":  # by the same kernels, and dear where they are interpreted
                checks.backward_agrees(subject, search)
        assert forced.launches, f"no case is one that {configuration.name} can do"
    request.node.user_properties.append(("configurations not run", not_run))
