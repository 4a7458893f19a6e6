"""The check that hundreds of calls give equal results, and that no later call changes a result."""

import contextlib
import functools
import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.history import change_values, distinguishes
from fourfold.checks.results import compare_results, describe, expected_results, named_results
from fourfold.checks.search import Search, Subject
from fourfold.instruments import costs
from fourfold.instruments.evaluation import gradients_of
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.compare import Agreement
from fourfold.numerics.dtypes import bits
from fourfold.operations.case import Case
from fourfold.operations.not_reached import NotReached
from fourfold.operations.outcomes import Exclusion, Failure, Unsupported

# More calls than 8 bits count, and more results than any ring of buffers holds.
CALLS = 400
# The number of named examples to try until one is taken. An implementation may refuse some.
ASKED = 4
# Every eighth call has a backward pass.
BACKWARD = 8
# The most functions that all calls together may call, by device, and the least number of calls of any kernel. One call
# of an interpreted Triton kernel calls thousands of functions.
FUNCTIONS, LEAST = {"cpu": 2_000_000, "cuda": 10_000_000}, 25
# The least number of tensors that calls leave alive and that count as a leak. A kernel may keep a few, once.
KEPT = 16
# The confidence with which a rate of wrong calls is excluded.
CONFIDENCE = 0.95
# The ways of a call: with a backward pass, and the contexts of those without one, in turn.
WITH_BACKWARD, WITHOUT = "with a backward pass", (contextlib.nullcontext, torch.no_grad, torch.inference_mode)
Results = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """A call of one of the two cases: its number, its way, its results and copies of them."""

    number: int
    place: int
    mode: object
    results: Results
    copies: Results


def excluded_rate(calls: int) -> float:
    """Return the upper bound on the rate of differing calls after `calls` equal ones, with CONFIDENCE.

    It solves ``(1 - rate)^calls = 1 - CONFIDENCE``.
    """
    return 1 - (1 - CONFIDENCE) ** (1 / calls)


def _pairs(subject: Subject) -> Iterator[tuple[str, Case, Case]]:
    """Yield named examples, each with a case of distinguishable values, in the order of `filled_examples`."""
    for name, case in subject.filled_examples().items():
        other = change_values(subject, case)
        expected = [expected_results(subject, c) for c in (other, case)]
        if distinguishes(subject, expected[0], expected[1]):
            yield name, case, other


class _Calls:
    """Calls of two cases on the same tensors, in an order without a period, with all results and copies of them."""

    def __init__(self, subject: Subject, cases: tuple[Case, Case]) -> None:
        self.subject, self.cases = subject, cases
        self.inputs = [case.tensors(subject.dtype, subject.device) for case in cases]
        names = subject.operation.differentiable_in(cases[0]) if subject.differentiable else ()
        self.leaves = [[tensors[name].detach().requires_grad_() for name in names] for tensors in self.inputs]
        self.recorded = [tensors | dict(zip(names, leaves)) for tensors, leaves in zip(self.inputs, self.leaves)]
        self.cotangents = [case.tensor("grad_output", subject.dtype, subject.device) for case in cases]
        self.names = names
        self.calls: list[_Call] = []
        self._living_before = self._living_tensors(keep_garbage=True)

    def make(self, place: int) -> None:
        """Call the implementation on the tensors of one case, and keep the results."""
        subject, parameters, number = self.subject, self.cases[place].parameters, len(self.calls)
        mode: Any = WITHOUT[number % len(WITHOUT)]
        if number % BACKWARD == 0 and self.names:
            mode = WITH_BACKWARD
            output = subject.call(**self.recorded[place], **parameters)
            gradients = gradients_of(output, self.leaves[place], self.cotangents[place])
            results = named_results(output.detach(), dict(zip(self.names, gradients)))
        else:
            with mode():
                results = named_results(subject.call(**self.inputs[place], **parameters).detach(), {})
        copies = {name: result.clone() for name, result in results.items()}
        self.calls.append(_Call(number=number, place=place, mode=mode, results=results, copies=copies))

    def _living_tensors(self, keep_garbage: bool) -> int:
        """Count the tensors in the process of the implementation: see `costs.living_tensors`."""
        process = self.subject.process
        return (costs if process is None else process).living_tensors(keep_garbage)

    def more_tensors(self) -> int:
        """Forget the results; return how many more tensors are alive than before the calls."""
        self.calls.clear()  # a result that is a view keeps another tensor alive
        return self._living_tensors(keep_garbage=False) - self._living_before

    def judge(self) -> list[Agreement]:
        """Compare the first results with the oracle's, the others with the first, and each with its copy.

        Calls are compared with those of the same way: a foreign implementation may compute otherwise in another mode.
        """
        agreements: list[Agreement] = []
        expected = [expected_results(self.subject, case) for case in self.cases]
        for place, mode in dict.fromkeys((call.place, call.mode) for call in self.calls):
            calls = [call for call in self.calls if (call.place, call.mode) == (place, mode)]
            for name in calls[0].results:
                agreements += self._judge_result(calls, name, expected[place])
        return agreements

    def _judge_result(self, calls: list[_Call], name: str, expected: dict[str, Bounded]) -> list[Agreement]:
        """Return the agreements of one result of calls of the same case in the same way."""
        subject, total, tensors = self.subject, len(self.calls), self.inputs[calls[0].place]
        first = calls[0].copies[name]

        def compare(call: _Call) -> list[Agreement]:
            context = f"call {call.number + 1} of many: "
            return compare_results(subject, {name: call.copies[name]}, expected, tensors, context)

        agreements = compare(calls[0])
        changed_later, differing = (_differing(calls, name, first, later=later) for later in (True, False))
        if differing and subject.claims.deterministic:
            problem = f"{len(differing)} of {len(calls)} calls on the same tensors gave another {name} than the first"
            problem += f": call {differing[0].number + 1} of {total}"
            raise Failure(f"{subject}: {problem}\nwith {describe(tensors)}", name)
        for call in differing:
            agreements += compare(call)
        if changed_later:
            problem = f"{name} of call {changed_later[0].number + 1} of {total} was changed by a later call"
            raise Failure(f"{subject}: {problem}, as were {len(changed_later)} of {len(calls)}", name)
        return agreements


def _differing(calls: list[_Call], name: str, first: torch.Tensor, later: bool) -> list[_Call]:
    """Return the calls whose copy differs in bits from the first or, if `later`, whose result from its copy."""
    equals = [call for call in calls if call.copies[name].shape == first.shape]
    copies = torch.stack([bits(call.copies[name]) for call in equals])
    compared = torch.stack([bits(call.results[name]) for call in equals]) if later else bits(first)
    differs = (copies != compared).reshape(len(equals), -1).any(1).tolist()
    differing = [call for call, differ in zip(equals, differs) if differ]
    return differing if later else sorted([*differing, *(c for c in calls if c not in equals)], key=lambda c: c.number)


@allow_storage_accuracy
def each_of_many_calls_is_alike(subject: Subject, search: Search) -> None:
    """Check that hundreds of calls on two small cases give equal results, and that the results stay unchanged.

    The check detects a counter that wraps, a ring of reused buffers, an error once in a hundred calls, and memory that
    grows with each call.
    `Search.remarks` states the number of calls and the rate of differing calls that they exclude.
    """
    pairs = list(itertools.islice(_pairs(subject), ASKED))
    if not pairs:
        raise Unsupported("no named example has values that its results distinguish from others", Exclusion.NO_CASE)

    with contextlib.ExitStack() as afterwards:
        afterwards.callback(gc.unfreeze)  # a failure leaves the objects of the first count of tensors frozen
        afterwards.enter_context(contextlib.suppress(NotReached))  # already counted, and true of all other cases
        for name, case, other in pairs:
            if search.run_named_case(name, case, functools.partial(_call_many_times, subject, search, other)):
                break
    search.require_evidence(subject, "many calls")


def _call_many_times(subject: Subject, search: Search, other: Case, case: Case) -> None:
    runner = _Calls(subject, (case, other))
    order = np.random.default_rng(0).integers(0, 2, CALLS)
    deadline = time.monotonic() + costs.MOST_SECONDS

    def make(total: int) -> None:
        for n in range(len(runner.calls), total):
            if n and time.monotonic() > deadline:
                return
            runner.make(int(order[n]))

    make(BACKWARD)  # the first calls may compile and tune
    count = 2 * BACKWARD
    if not search.brief:
        cost = costs.functions_called(functools.partial(make, count)) / BACKWARD
        count = max(LEAST, costs.calls_within(FUNCTIONS[subject.device], cost, CALLS))
    make(count)
    agreements, total = runner.judge(), len(runner.calls)
    if (leaked := runner.more_tensors()) >= max(KEPT, total // BACKWARD):
        raise Failure(f"{subject}: {total} calls on the same tensors have left {leaked} more tensors alive")
    search.saw(*agreements)
    with_backward = len(range(0, total, BACKWARD)) if runner.names else 0
    finding = "no differing call" if subject.claims.deterministic else "no wrong call"
    search.remarks.append(
        f"{finding} in {total} ({with_backward} of them with a backward pass):"
        f" a rate over {excluded_rate(total):.2%} is excluded with {CONFIDENCE:.0%} confidence"
    )
    costs.require_calls(total, count)
