"""Threads that make calls at once, and let one another run in their midst."""

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fourfold.instruments import costs

# How often each thread calls at most.
CALLS = 40
# By device: how many functions a thread calls at most. The turns of the threads count as `CALL` functions in each call.
FUNCTIONS, CALL = {"cpu": 30_000, "cuda": 150_000}, 1_000
# How often a thread lets the others run within a call, about.
TURNS = 10
# Seconds of the clock that threads are waited for while none of them ends a call. They wait for one another for ever.
PATIENCE = 60.0
Results = TypeVar("Results")


class NeverReturns(Exception):
    """Threads have not come to their ends, and end no call."""


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


def _all_end(threads: Sequence[threading.Thread], found: Sequence[Sequence[Any]], patience: float) -> bool:
    """Wait for threads to end; gives whether they have."""
    before = None
    while alive := [thread for thread in threads if thread.is_alive()]:
        progress = len(alive), sum(map(len, found))
        if progress == before:
            return False
        before = progress
        alive[0].join(patience)
    return True


def called_at_once(
    calls: Sequence[Callable[[], Results]],
    functions: float,
    begin: Callable[[], None] = lambda: None,
    patience: float | None = None,
) -> tuple[int, list[list[Results]]]:
    """Call from a thread for each of `calls`, again and again, all at once and taking turns.

    Gives the number of calls that each thread was to make, and the results. There are fewer where the calls take longer
    than `costs.MOST_SECONDS`.

    Args:
        calls: what each thread calls. The first of them was called before.
        functions: what the calls of a thread may cost, as in `FUNCTIONS`.
        begin: is called in each thread first.
        patience: seconds; `PATIENCE` unless given.

    Raises:
        NeverReturns: a thread has not come to its end.
        BaseException: what a thread has raised.
    """
    cost = costs.functions_called(calls[0])
    wanted, share = costs.calls_within(functions, CALL + cost, CALLS), TURNS / max(cost, TURNS)
    found: list[list[Results]] = [[] for _ in calls]
    raised: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(place: int) -> None:
        try:
            begin()
            start.wait()
            sys.setprofile(_Turns(share, place))
            for _ in range(wanted):
                found[place].append(calls[place]())
                if time.monotonic() > until:
                    break
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    until = time.monotonic() + costs.MOST_SECONDS
    for thread in threads:
        thread.start()
    ended = _all_end(threads, found, PATIENCE if patience is None else patience)
    if raised:
        raise raised[0]
    if not ended:
        raise NeverReturns(f"of {len(calls)} threads that call at once some never return")
    return wanted, found
