"""The check that a tuned kernel is right in each configuration, because another GPU or another size may choose it."""

from dataclasses import replace

import torch

from fourfold.backends import tuning
from fourfold.backends.tuning import Configuration
from fourfold.checks.forward import forward_agrees
from fourfold.checks.search import Search, Subject
from fourfold.operations.outcomes import Failure, Unsupported


def configuration_agrees(configuration: Configuration, subject: Subject, search: Search) -> None:
    """Check that the output of one configuration agrees with the oracle's, and that some case is launched with it.

    Gradients are not checked: they come from the same kernel, with layouts that cases have as well. Combined cases
    are left out, because they test the wrapper, which all configurations share.

    Raises:
        Unsupported: the device cannot run the configuration.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if subject.device == "cuda" else torch.device("cpu")
    if not configuration.runs_on(device):
        raise Unsupported(f"the configuration needs {configuration.needs}")
    kernel = f"{subject.operation.name}_{subject.backend}"
    if subject.large is not None:
        subject = replace(subject, large=replace(subject.large, every_nth=0))
    with tuning.force_configuration(kernel, configuration.name) as forced:
        forward_agrees(subject, search)
    if not forced.launches:
        raise Failure(f"{subject}: no case is one that the configuration {configuration.name} can do")
