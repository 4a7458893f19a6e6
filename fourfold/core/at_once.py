"""Threads that make calls at once, and let one another run in their midst."""

import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

# How often each thread calls at most.
CALLS = 40
# How often a thread lets the others run within a call, about.
TURNS = 10
# Seconds that a thread is waited for. One that takes longer waits for another for ever.
PATIENCE = 60.0
Results = TypeVar("Results")


class NeverReturns(Exception):
    """A thread has not come to its end."""


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


def called_at_once(
    calls: Sequence[Callable[[], Results]],
    seconds: float,
    begin: Callable[[], None] = lambda: None,
    patience: float | None = None,
) -> list[list[Results]]:
    """The results of calls that a thread for each of them makes again and again, all at once, taking turns.

    Args:
        calls: what each thread calls.
        seconds: of the processors after which no thread makes a further call.
        begin: is called in each thread first.
        patience: seconds that a thread is waited for; `PATIENCE` unless given.

    Raises:
        NeverReturns: a thread has not come to its end.
        BaseException: what a thread has raised.
    """
    share = TURNS / max(_functions_called(calls[0]), TURNS)
    found: list[list[Results]] = [[] for _ in calls]
    raised: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(place: int) -> None:
        try:
            begin()
            start.wait()
            sys.setprofile(_Turns(share, place))
            while len(found[place]) < CALLS and time.process_time() < until:
                found[place].append(calls[place]())
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    until = time.process_time() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE if patience is None else patience)
    if raised:
        raise raised[0]
    if any(thread.is_alive() for thread in threads):
        raise NeverReturns(f"of {len(calls)} threads that call at once some never return")
    return found
