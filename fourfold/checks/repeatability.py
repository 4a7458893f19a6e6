"""The check that the same call gives the same bits."""

import contextlib

from fourfold import backends
from fourfold.checks.results import describe, named_results
from fourfold.checks.search import Search, Subject
from fourfold.numerics.compare import Agreement
from fourfold.numerics.dtypes import differing
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure, Unclaimed


def repeats_bit_for_bit(subject: Subject, search: Search) -> None:
    """Check that two equal calls give the same bits: no floating-point atomics, no reads of uninitialised memory."""

    def body(case: Case) -> None:
        runs = []
        for order in (contextlib.nullcontext(), backends.other_order(subject.device)):
            with order:
                output, gradients, tensors = subject.evaluate(case)
            runs.append((output.detach().clone(), {name: g.clone() for name, g in gradients.items()}))
        (output, gradients), (again, gradients_again) = runs
        first, second = named_results(output, gradients), named_results(again, gradients_again)
        for name, count in zip(first, differing(zip(first.values(), second.values()))):
            if count:
                raise Failure(f"{subject}: the {name} differs between two calls\nwith {describe(tensors)}", name)
        search.saw(*(Agreement(0.0, result.numel(), 0) for result in first.values()))

    # Few cases are enough if threads run in one order only. Two calls then differ only by the memory that they read,
    # and `memory_is_respected` is the stricter check of that.
    if not subject.claims.deterministic:
        raise Unclaimed("the same bits twice")
    search.cases(subject, "repeats", body, few=backends.has_one_order(subject.backend, subject.device))
