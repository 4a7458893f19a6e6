"""The check that hundreds of calls give equal results, and that no later call changes a result."""

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator

import numpy as np
import torch

from fourfold.checks.grades import graded
from fourfold.checks.history import changed, tells_apart
from fourfold.checks.results import compare_results, describe, expected_results, named_results
from fourfold.checks.search import Search, Subject
from fourfold.instruments import costs
from fourfold.instruments.evaluation import gradients_of
from fourfold.numerics.compare import Agreement
from fourfold.numerics.dtypes import bits
from fourfold.operations.case import Case
from fourfold.operations.not_reached import NotReached
from fourfold.operations.outcomes import Failure, Unsupported

# More calls than 8 bits count, and more results than anybody keeps buffers for.
CALLS = 400
# The number of named examples to try until one is taken. An implementation may refuse some.
ASKED = 4
# Every eighth call has a backward pass.
BACKWARD = 8
# The most functions that all calls together may call, by device, and the least number of calls of any kernel. One call
# of an interpreted Triton kernel calls thousands of functions.
FUNCTIONS, LEAST = {"cpu": 2_000_000, "cuda": 10_000_000}, 25
# The confidence with which a rate of wrong calls is excluded.
CONFIDENCE = 0.95
Results = dict[str, torch.Tensor]


def excluded_rate(calls: int) -> float:
    """Return the upper bound on the rate of differing calls after `calls` equal ones, with CONFIDENCE.

    It solves ``(1 - rate)^calls = 1 - CONFIDENCE``.
    """
    return 1 - (1 - CONFIDENCE) ** (1 / calls)


def _pairs(subject: Subject) -> Iterator[tuple[str, Case, Case]]:
    """Yield named examples, each with a case of distinguishable values, in the order of `filled_examples`."""
    for name, case in subject.filled_examples().items():
        other = changed(subject, case)
        expected = [expected_results(subject, each) for each in (other, case)]
        if tells_apart(subject, expected[0], expected[1]):
            yield name, case, other


class _Calls:
    """Calls of two cases on the same tensors, in an order without a period, with all results and copies of them."""

    def __init__(self, subject: Subject, cases: tuple[Case, Case]) -> None:
        self.subject, self.cases = subject, cases
        self.inputs = [case.tensors(subject.dtype, subject.device) for case in cases]
        names = subject.operation.differentiable_in(cases[0]) if subject.differentiable else ()
        self.leaves = [[given[name].detach().requires_grad_() for name in names] for given in self.inputs]
        self.recorded = [given | dict(zip(names, leaves)) for given, leaves in zip(self.inputs, self.leaves)]
        self.cotangents = [case.tensor("grad_output", subject.dtype, subject.device) for case in cases]
        self.names = names
        self.made: list[tuple[int, Results, Results]] = []

    def make(self, place: int, backward: bool) -> None:
        """Call the implementation on the tensors of one case, and keep the results."""
        subject, parameters = self.subject, self.cases[place].parameters
        if backward and self.names:
            output = subject.call(**self.recorded[place], **parameters)
            gradients = gradients_of(output, self.leaves[place], self.cotangents[place])
            results = named_results(output.detach(), dict(zip(self.names, gradients)))
        else:
            results = named_results(subject.call(**self.inputs[place], **parameters).detach(), {})
        self.made.append((place, results, {name: result.clone() for name, result in results.items()}))

    def judge(self) -> list[Agreement]:
        """Compare the first results with the oracle's, the others with the first, and each with its copy."""
        agreements, total = [], len(self.made)
        for place, case in enumerate(self.cases):
            expected = expected_results(self.subject, case)
            for name in expected:
                found = [
                    (n, made[name], copy[name])
                    for n, (of, made, copy) in enumerate(self.made)
                    if of == place and name in made
                ]
                if not found:
                    continue
                (first, _, right), *_ = found
                when, given = f"call {first + 1} of many: ", self.inputs[place]
                agreements += compare_results(self.subject, {name: right}, expected, given, when)
                changed_later, wrong = (self._differing(found, right, later=later) for later in (True, False))
                if wrong and self.subject.claims.deterministic:
                    what = f"{len(wrong)} of {len(found)} calls on the same tensors gave another {name} than the first"
                    what += f": call {wrong[0] + 1} of {total}"
                    raise Failure(f"{self.subject}: {what}\nwith {describe(given)}", name)
                for n in wrong:
                    copy = {name: self.made[n][2][name]}
                    agreements += compare_results(self.subject, copy, expected, given, f"call {n + 1} of many: ")
                if changed_later:
                    what = f"{name} of call {changed_later[0] + 1} of {total} was changed by a later call"
                    raise Failure(f"{self.subject}: {what}, as were {len(changed_later)} of {len(found)}", name)
        return agreements

    @staticmethod
    def _differing(found: list[tuple[int, torch.Tensor, torch.Tensor]], right: torch.Tensor, later: bool) -> list[int]:
        """Return the calls whose copy differs in bits from the first or, if `later`, whose result from its copy."""
        odd = [n for n, _, copy in found if copy.shape != right.shape]
        alike = [each for each in found if each[2].shape == right.shape]
        copies = torch.stack([bits(copy) for _, _, copy in alike])
        against = torch.stack([bits(made) for _, made, _ in alike]) if later else bits(right)
        differs = (copies != against).reshape(len(alike), -1).any(1).tolist()
        return sorted([n for (n, _, _), each in zip(alike, differs) if each] + ([] if later else odd))


@graded
def each_of_many_calls_is_alike(subject: Subject, search: Search) -> None:
    """Check that hundreds of calls on two small cases give equal results, and that the results stay unchanged.

    The check detects a counter that wraps, a ring of reused buffers, and an error once in a hundred calls.
    `Search.remarks` states the number of calls and the rate of differing calls that they exclude.
    """
    found = list(itertools.islice(_pairs(subject), ASKED))
    if not found:
        raise Unsupported("no named example has values that are told from others")

    with contextlib.suppress(NotReached):  # already counted, and true of all other cases
        for name, case, other in found:
            if search.one(name, case, functools.partial(_call_many_times, subject, search, other)):
                break
    search.must_have_seen_something(subject, "many calls")


def _call_many_times(subject: Subject, search: Search, other: Case, case: Case) -> None:
    calls = _Calls(subject, (case, other))
    order = np.random.default_rng(0).integers(0, 2, CALLS)
    until = time.monotonic() + costs.MOST_SECONDS

    def make(total: int) -> None:
        for n in range(len(calls.made), total):
            if n and time.monotonic() > until:
                return
            calls.make(int(order[n]), backward=n % BACKWARD == 0)

    make(BACKWARD)  # the first calls may compile and tune
    cost = costs.functions_called(functools.partial(make, 2 * BACKWARD)) / BACKWARD
    wanted = max(LEAST, costs.calls_within(FUNCTIONS[subject.device], cost, CALLS))
    make(wanted)
    agreements = calls.judge()
    search.saw(*agreements)
    total = len(calls.made)
    with_backward = len(range(0, total, BACKWARD)) if calls.names else 0
    alike = "no differing call" if subject.claims.deterministic else "no wrong call"
    search.remarks.append(
        f"{alike} in {total} ({with_backward} of them with a backward pass):"
        f" a rate over {excluded_rate(total):.2%} is excluded with {CONFIDENCE:.0%} confidence"
    )
    costs.need_all(total, wanted)
