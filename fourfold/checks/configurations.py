"""The check that a configuration of a tuned kernel, which another GPU or another size may choose, is right as well."""

from dataclasses import replace

import torch

from fourfold.backends import tuning
from fourfold.backends.tuning import Configuration
from fourfold.checks.forward import forward_agrees
from fourfold.checks.search import Search, Subject
from fourfold.operations.outcomes import Failure, Unsupported


def configuration_agrees(configuration: Configuration, subject: Subject, search: Search) -> None:
    """The output of one configuration agrees with the oracle's, and some case is launched with it.

    Gradients are not asked for: they come of the same kernel, with the layouts that cases have as well. Nor are
    combined cases, which are about the wrapper that all configurations share.

    Raises:
        Unsupported: the device cannot run it.
    """
    where = torch.device("cuda", torch.cuda.current_device()) if subject.device == "cuda" else torch.device("cpu")
    if not configuration.runs_on(where):
        raise Unsupported(f"the configuration needs {configuration.needs}")
    kernel = f"{subject.operation.name}_{subject.backend}"
    if subject.large is not None:
        subject = replace(subject, large=replace(subject.large, every=0))
    with tuning.forced(kernel, configuration.name) as forced:
        forward_agrees(subject, search)
    if not forced.launches:
        raise Failure(f"{subject}: no case is one that the configuration {configuration.name} can do")
