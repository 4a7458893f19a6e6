"""The check that a tuned kernel is right in each configuration, because another GPU or another size may choose it."""

from dataclasses import replace

import torch

from fourfold.backends import tuning
from fourfold.backends.tuning import Configuration, Forced
from fourfold.checks.backward import backward_agrees
from fourfold.checks.forward import forward_agrees
from fourfold.checks.search import Search, Subject
from fourfold.operations.outcomes import Failure, Unsupported, Vacuous


def configuration_agrees(configuration: Configuration, subject: Subject, search: Search) -> None:
    """Check that the results of one configuration agree with the oracle's, and that some case is launched with it.

    Combined cases are left out, because they test the wrapper, which all configurations share.

    Raises:
        Unsupported: the device cannot run the configuration.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if subject.device == "cuda" else torch.device("cpu")
    if not configuration.runs_on(device):
        raise Unsupported(f"the configuration needs {configuration.needs}")
    if subject.large is not None:
        subject = replace(subject, large=replace(subject.large, every_nth=0))
    if not agrees_if_forced(configuration.name, subject, search).launches:
        raise Failure(f"{subject}: no case is one that the configuration {configuration.name} can do")


def agrees_if_forced(configuration: str, subject: Subject, search: Search) -> Forced:
    """Check that the results agree with the oracle's where the named configuration is forced; return its launches.

    Gradients are checked only of a configuration that is `of_gradients`. Those of any other come from the same kernel,
    with layouts that cases have as well. Without gradients, a case that the configuration cannot do is left out: the
    check of the default configuration has it.
    """
    with tuning.force_configuration(f"{subject.operation.name}_{subject.backend}", configuration) as forced:
        forced.alone = not forced.configuration.of_gradients
        try:
            (forward_agrees if forced.alone else backward_agrees)(subject, search)
        except Vacuous:
            if forced.launches:
                raise
    return forced
