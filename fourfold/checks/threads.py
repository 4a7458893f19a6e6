"""The check that threads which call at once get what each of them gets alone."""

import itertools
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from fourfold.checks.grades import graded
from fourfold.checks.history import changed, tells_apart
from fourfold.checks.results import compare_results, describe, expected_results, named_results
from fourfold.checks.search import Failure, Search, Subject, need
from fourfold.core.case import Case
from fourfold.core.dtypes import differing
from fourfold.core.operation import gradients_of

# Threads that call at once, half of them with other values, and how often each calls at most.
THREADS, CALLS = 4, 40
# By device: seconds of the processors after which a thread makes no further call. Waiting for a GPU counts as well.
PROCESSOR_SECONDS = {"cpu": 0.1, "cuda": 0.5}
# How often a thread lets the others run within a call, about.
TURNS = 10
# Seconds that a thread is waited for. One that takes longer waits for another for ever.
PATIENCE = 60.0
Results = dict[str, torch.Tensor]


class _Turns:
    """Lets other threads run in the midst of a call, wherever it calls a function: Python itself seldom does.

    Args:
        share: of the functions that are called.
        seed: of the choice which.
    """

    def __init__(self, share: float, seed: int) -> None:
        self.share, self.random = share, random.Random(seed).random

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if self.random() < self.share:
            time.sleep(0)


def _functions_called(call: Callable[[], Any]) -> int:
    """How many functions a call calls."""
    events, before = itertools.count(), sys.getprofile()
    sys.setprofile(lambda frame, event, argument: next(events) and None)
    try:
        call()
    finally:
        sys.setprofile(before)
    return next(events)


def _called(subject: Subject, case: Case) -> Results:
    """The results of a call, of which nothing is asked but that: other threads may change what tampering would."""
    tensors = case.tensors(subject.dtype, subject.device)
    names = subject.operation.differentiable_in(case) if subject.differentiable else ()
    for name in names:
        tensors[name].requires_grad_()
    output = subject.call(**tensors, **case.parameters)
    grad_output = case.tensor("grad_output", subject.dtype, subject.device)
    gradients = gradients_of(output, [tensors[name] for name in names], grad_output) if names else ()
    return named_results(output.detach(), dict(zip(names, gradients)))


def _at_once(subject: Subject, cases: list[Case], share: float) -> list[list[Results]]:
    """The results of calls that a thread for each case makes, all at once, taking turns: see `_Turns`.

    Raises:
        Failure: a thread has not come to its end.
        BaseException: what a thread has raised.
    """
    found: list[list[Results]] = [[] for _ in cases]
    raised: list[BaseException] = []
    start = threading.Barrier(len(cases))
    device = torch.cuda.current_device() if subject.device == "cuda" else None

    def run(place: int) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own
            start.wait()
            sys.setprofile(_Turns(share, place))
            while len(found[place]) < CALLS and time.process_time() < until:
                found[place].append(_called(subject, cases[place]))
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(cases))]
    until = time.process_time() + PROCESSOR_SECONDS[subject.device]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if raised:
        raise raised[0]
    if any(thread.is_alive() for thread in threads):
        raise Failure(f"{subject}: of {THREADS} threads that call at once some never return")
    if device is not None:
        torch.cuda.synchronize()
    return found


@graded
def threads_do_not_matter(subject: Subject, search: Search) -> None:
    """Several threads that call at once, with other values each, get results that are right.

    Our own kernels give the bits that one thread alone gets. Of torch that is not asked, nor of somebody else's
    implementation, which may call it: torch shares the work of a call in other parts where another thread makes it, and
    then sums in another order.
    """
    subject.needs_this_process("calls take turns there")
    same_bits = subject.claims.deterministic and not subject.foreign and subject.backend != "torch"

    def body(case: Case) -> None:
        other = changed(subject, case)
        cases, expected = [case, other], [expected_results(subject, each) for each in (case, other)]
        need(tells_apart(subject, expected[1], expected[0]))
        alone, agreements = [], []
        for each, right in zip(cases, expected):
            output, gradients, tensors = subject.evaluate(each)  # the first call may compile, tune and allocate
            alone.append(named_results(output.detach(), gradients))
            agreements += compare_results(subject, alone[-1], right, tensors, "before threads call at once: ")
        share = TURNS / max(_functions_called(lambda: _called(subject, case)), TURNS)
        for place, calls in enumerate(_at_once(subject, [cases[place % 2] for place in range(THREADS)], share)):
            given = cases[place % 2].tensors(subject.dtype, subject.device)
            for results in calls:
                when = f"where {THREADS} threads call at once: "
                agreements += compare_results(subject, results, expected[place % 2], given, when)
                same = differing((results[name], alone[place % 2][name]) for name in results) if same_bits else []
                for name, count in zip(results, same):
                    if count:
                        raise Failure(f"{subject}: {when}{name} is not the same bit for bit\nwith {describe(given)}")
        search.saw(*agreements)

    search.cases(subject, "threads", body, few=True, also=subject.small_example())
