"""The check that the same call gives the same bits, in this process and in another one."""

import contextlib
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import torch

from fourfold import backends
from fourfold.backends.triton.compilation import ends_within
from fourfold.checks.results import named_results, require_same_bits
from fourfold.checks.search import Search, Subject
from fourfold.numerics.compare import Agreement
from fourfold.operations.case import Case
from fourfold.operations.not_reached import NotReached
from fourfold.operations.outcomes import Unclaimed

# The most elements of the named example that is repeated in another process.
MOST_ELEMENTS = 4096
# The limit in seconds of processor time for a call in a forked process.
SECONDS = 60
Results = dict[str, torch.Tensor]


def repeats_bit_for_bit(subject: Subject, search: Search) -> None:
    """Check that two equal calls give the same bits: no floating-point atomics, no reads of uninitialised memory.

    A foreign implementation might keep its results in a table and look them up in the second call. So it makes one call
    in another process as well, without gradients, on values that it has not seen before.
    """

    def body(case: Case) -> None:
        first, tensors = _results(subject, case)
        second = _results_in_other_order(subject, case)
        require_same_bits(subject, first, second, tensors, "the ", "differs between two calls")
        search.saw(*(Agreement(0.0, result.numel(), 0) for result in first.values()))

    def elsewhere(case: Case) -> None:
        second = _results_of_another_process(subject, case)
        if second is not None:
            first, tensors = _results(subject, case, gradients=False)
            problem = "differs between a call in this process and one in another"
            require_same_bits(subject, first, second, tensors, "the ", problem)

    # Few cases are enough if threads run in one order only. Two calls then differ only by the memory that they read,
    # and `memory_is_respected` is the stricter check of that.
    if not subject.claims.deterministic:
        raise Unclaimed("the same bits twice")
    search.cases(subject, "repeats", body, few=backends.has_one_order(subject.backend, subject.device))
    if subject.foreign and subject.device == "cpu" and not search.brief:
        small = [pair for pair in subject.filled_examples().items() if pair[1].elements <= MOST_ELEMENTS]
        other = subject.operation.with_other_numbers
        with contextlib.suppress(NotReached):  # already counted
            for name, case in sorted(small, key=lambda pair: pair[1].elements)[-1:]:
                search.one(name, other(other(case)), elsewhere)  # other checks take the other numbers of an example


def _results(subject: Subject, case: Case, gradients: bool = True) -> tuple[Results, dict[str, torch.Tensor]]:
    """Return copies of a call's results, and the tensors of the call."""
    output, found, tensors = subject.evaluate(case, gradients)
    return {name: each.detach().clone() for name, each in named_results(output, found).items()}, tensors


def _results_in_other_order(subject: Subject, case: Case, gradients: bool = True) -> Results:
    with backends.other_order(subject.device):
        return _results(subject, case, gradients)[0]


def _results_of_another_process(subject: Subject, case: Case) -> Results | None:
    """Return the output of a call in another process, or None if that process fails.

    It is a new process of an implementation that has its own, or else a fork of this one.
    """
    if subject.process is not None:
        with subject.process.afresh():
            return _results_in_other_order(subject, case, gradients=False)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"

        def save() -> None:
            torch.set_num_threads(1)  # torch's threads do not survive a fork
            torch.rand(()), np.random.rand(), random.random()  # another process draws other numbers
            # The threads of autograd do not survive a fork either.
            torch.save(_results_in_other_order(subject, case, gradients=False), results.with_suffix(".part"))
            os.replace(results.with_suffix(".part"), results)

        ends_within(save, SECONDS)
        return torch.load(results, weights_only=True) if results.exists() else None
