"""The check that threads which call at the same time get the results of separate calls."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.history import change_values, distinguishes
from fourfold.checks.results import compare_results, expected_results, named_results, require_same_bits
from fourfold.checks.search import Search, Subject, need
from fourfold.instruments.concurrent_calls import FUNCTIONS, NeverReturns, call_at_once
from fourfold.instruments.costs import require_calls
from fourfold.instruments.evaluation import blame_implementation, gradients_of
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure, Unsupported

# The number of threads that call at once, half of them with other values.
THREADS = 4
Results = dict[str, torch.Tensor]


def _arguments(subject: Subject, case: Case) -> tuple[dict[str, torch.Tensor], Sequence[str], torch.Tensor]:
    """Return the tensors of a call, the names of those that require gradients, and the cotangent."""
    tensors = case.tensors(subject.dtype, subject.device)
    names = subject.operation.differentiable_in(case) if subject.differentiable else ()
    for name in names:
        tensors[name].requires_grad_()
    return tensors, names, case.tensor("grad_output", subject.dtype, subject.device)


def _call_twice(subject: Subject, case: Case) -> list[Results]:
    """Return the results of a call with gradients, if there are any, and of one under `no_grad`.

    The check of tampering is left out: other threads may change the state that it compares.
    """
    tensors, names, grad_output = _arguments(subject, case)
    output = subject.call(**tensors, **case.parameters)
    gradients = gradients_of(output, [tensors[name] for name in names], grad_output) if names else ()
    with torch.no_grad():
        plain = subject.call(**{name: tensor.detach() for name, tensor in tensors.items()}, **case.parameters)
    return [named_results(output.detach(), dict(zip(names, gradients))), named_results(plain, {})]


def _call_threads(subject: Subject, cases: list[Case]) -> tuple[int, list[list[list[Results]]]]:
    """Call from a thread for each case, all at once: see `call_at_once`.

    Raises:
        Failure: a thread does not end.
        BaseException: the exception that a thread raised.
    """
    functions = FUNCTIONS[subject.device]
    try:
        if subject.elsewhere:
            return _call_elsewhere(subject, cases, functions)
        device = torch.cuda.current_device() if subject.device == "cuda" else None

        def begin() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own

        results = call_at_once([functools.partial(_call_twice, subject, case) for case in cases], functions, begin)
        if device is not None:
            torch.cuda.synchronize()
        return results
    except NeverReturns as error:
        raise Failure(f"{subject}: {error}") from None


def _call_elsewhere(subject: Subject, cases: list[Case], functions: float) -> tuple[int, list[list[list[Results]]]]:
    """Do the same as `_call_threads` in the process in which the implementation runs."""
    implementation: Any = subject.implementation
    calls, inputs = [], []
    for case in cases:
        tensors, names, grad_output = _arguments(subject, case)
        calls.append(({**tensors, **case.parameters}, grad_output))
        inputs.append(names)
    with blame_implementation():
        count, results = implementation.call_at_once(calls, inputs, functions)
    return count, [
        [[named_results(output, dict(zip(names, grads))), named_results(plain, {})] for output, grads, plain in calls]
        for names, calls in zip(inputs, results)
    ]


@allow_storage_accuracy
def threads_do_not_matter(subject: Subject, search: Search) -> None:
    """Check the results of several threads that call at once, with two sets of values, with gradients and without.

    This library's own kernels must give the same bits as a call from a single thread. Torch and other implementations,
    which may call torch, need not: in another thread, torch divides a call's work differently, and then sums in another
    order.

    Raises:
        Unsupported: the implementation works in place, in a process of its own.
    """
    if subject.elsewhere and subject.operation.mutates:
        raise Unsupported("threads cannot share a process of its own with a call that writes into its arguments")
    same_bits = subject.claims.deterministic and not subject.foreign and subject.backend != "torch"

    def body(case: Case) -> None:
        other = change_values(subject, case)
        cases, expected = [case, other], [expected_results(subject, c) for c in (case, other)]
        need(distinguishes(subject, expected[1], expected[0]))
        alone, agreements = [], []
        for own_case, own_expected in zip(cases, expected):
            output, gradients, tensors = subject.evaluate(own_case)  # the first call may compile, tune and allocate
            alone.append(named_results(output.detach(), gradients))
            agreements += compare_results(subject, alone[-1], own_expected, tensors, "before threads call at once: ")
        count, results_by_thread = _call_threads(subject, [cases[place % 2] for place in range(THREADS)])
        for place, calls in enumerate(results_by_thread):
            tensors_of_call = cases[place % 2].tensors(subject.dtype, subject.device)
            for results in itertools.chain.from_iterable(calls):
                context = f"where {THREADS} threads call at once: "
                agreements += compare_results(subject, results, expected[place % 2], tensors_of_call, context)
                if same_bits:
                    require_same_bits(subject, results, alone[place % 2], tensors_of_call, context)
        search.saw(*agreements)
        require_calls(sum(map(len, results_by_thread)), count * THREADS)

    search.cases(subject, "threads", body, sparse=True, extra=subject.small_example())
