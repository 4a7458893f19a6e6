"""The check that the same call gives the same bits, in this process and in another one."""

import contextlib
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fourfold import backends
from fourfold.backends.triton.compilation import ends_within
from fourfold.checks.results import compare_results, expected_results, named_results, require_same_bits
from fourfold.checks.search import Search, Subject
from fourfold.numerics.compare import Agreement
from fourfold.operations.case import Case
from fourfold.operations.not_reached import NotReached
from fourfold.operations.outcomes import Failure, Unclaimed
from fourfold.operations.refusals import is_refusal

# The most elements of a named example that is repeated in another process, and about the most such examples.
MOST_ELEMENTS, MOST_CASES = 4096, 3
# The limit in seconds of processor time for a call in a forked process.
SECONDS = 60
OTHER = "another process, such as a user's"
# What differs, by whether both calls are made in forks of this process.
DIFFERS = {
    False: f"differs between a call in this process and one in {OTHER}",
    True: "differs between calls in two new processes, on other numbers than these",
}
ENDED = "calls in new processes ended without a result, and were not compared"
Results = dict[str, torch.Tensor]


def repeats_bit_for_bit(subject: Subject, search: Search) -> None:
    """Check that two equal calls give the same bits: no floating-point atomics, no reads of uninitialised memory.

    A foreign implementation might keep its results in a table and look them up in the second call, or be right only
    where it recognises its judge. So it makes a few calls in another process as well, on values that it has not seen
    before. If it has a process of its own, the other is like a user's: it works in the user's folder, and neither its
    modules, its command line, its variables, its callers nor its ancestors show a judge. If it has none, two forks of
    this process each make the call. The results are held against the oracle's, too.
    """

    def body(case: Case) -> None:
        first, tensors = _results(subject, case)
        second = _results_in_other_order(subject, case)
        require_same_bits(subject, first, second, tensors, "the ", "differs between two calls")
        search.saw(*(Agreement(0.0, result.numel(), 0) for result in first.values()))

    def elsewhere(example: Case) -> None:
        # Other checks take the example and its other numbers, and a diagnosis of the failure calls the example here.
        case = subject.operation.redraw_numbers(subject.operation.redraw_numbers(example))
        error = second = None
        try:
            second = _results_of_another_process(subject, case)
        except Exception as exception:
            error = exception
        if subject.process is None:  # a call in this process would leave its results to later forks
            first, tensors = _results_of_another_process(subject, case), case.tensors(subject.dtype, subject.device)
        else:
            first, tensors = _results(subject, case)
        if error is not None:
            reason = f"the call raised {type(error).__name__} in {OTHER}, and not in this one: {error}"
            raise Failure(f"{subject}: {reason}") if is_refusal(error) else error
        if first is None or second is None:
            subject.evaluate(case)  # which raises what ended the forks, such as a refusal
            if ENDED not in search.remarks:
                search.remarks.append(ENDED)
            return
        if subject.claims.deterministic:
            require_same_bits(subject, first, second, tensors, "the ", DIFFERS[subject.process is None])
        rounded = replace(subject, dtype=subject.dtype.with_rounded_steps)  # another check grades the accuracy
        compare_results(rounded, second, expected_results(rounded, case), tensors, f"in {OTHER}, the ")

    # Few cases are enough if threads run in one order only. Two calls then differ only by the memory that they read,
    # and `memory_is_respected` is the stricter check of that.
    if subject.claims.deterministic:
        search.cases(subject, "repeats", body, sparse=backends.has_one_order(subject.backend, subject.device))
    if subject.foreign and subject.device == "cpu" and not search.brief:
        small = [pair for pair in subject.filled_examples().items() if pair[1].elements <= MOST_ELEMENTS]
        small.sort(key=lambda pair: pair[1].elements)
        with contextlib.suppress(NotReached):  # already counted
            for name, case in small[:: -max(1, len(small) // MOST_CASES)]:
                search.run_named_case(name, case, elsewhere)
    if not subject.claims.deterministic:
        raise Unclaimed("the same bits twice")


def _results(subject: Subject, case: Case, gradients: bool = True) -> tuple[Results, dict[str, torch.Tensor]]:
    """Return copies of a call's results, and the tensors of the call."""
    output, gradients_by_name, tensors = subject.evaluate(case, gradients)
    return {name: result.detach().clone() for name, result in named_results(output, gradients_by_name).items()}, tensors


def _results_in_other_order(subject: Subject, case: Case, gradients: bool = True) -> Results:
    with backends.other_order(subject.device):
        return _results(subject, case, gradients)[0]


def _results_of_another_process(subject: Subject, case: Case) -> Results | None:
    """Return the results of a call in another process, or None if that process fails.

    It is a new process of an implementation that has its own, or else a fork of this one, with other random numbers.
    """
    if subject.process is not None:
        with subject.process.afresh():
            return _results_in_other_order(subject, case)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        # On a machine with a GPU autograd has threads, which do not survive a fork.
        gradients = not torch.cuda.is_available()

        def save() -> None:
            torch.set_num_threads(1)  # torch's threads do not survive a fork
            torch.manual_seed(os.getpid()), np.random.seed(os.getpid()), random.seed(os.getpid())
            torch.save(_results_in_other_order(subject, case, gradients), results.with_suffix(".part"))
            os.replace(results.with_suffix(".part"), results)

        ends_within(save, SECONDS)
        return torch.load(results, weights_only=True) if results.exists() else None
