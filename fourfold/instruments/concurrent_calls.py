"""Concurrent calls from several threads, which also switch in the middle of a call."""

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fourfold.instruments import costs

# The most calls of each thread.
CALLS = 40
# The most function calls of a thread, by device. The switches between threads count as `CALL` functions in each call.
FUNCTIONS, CALL = {"cpu": 30_000, "cuda": 150_000}, 1_000
# The approximate number of times that a thread lets the others run within a call.
TURNS = 10
# Seconds of the clock without a completed call after which the threads count as deadlocked.
PATIENCE = 60.0
Results = TypeVar("Results")


class NeverReturns(Exception):
    """Threads neither end nor complete a call."""


class _Turns:
    """A profile function that lets other threads run in the middle of a call, which Python itself seldom does.

    Args:
        share: the share of function calls at which to switch.
        seed: of the random choice.
    """

    def __init__(self, share: float, seed: int) -> None:
        self.share, self.random = share, random.Random(seed).random

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if self.random() < self.share:
            time.sleep(0)


def _join_all(threads: Sequence[threading.Thread], results: Sequence[Sequence[Any]], patience: float) -> bool:
    """Wait for threads to end; return whether they did."""
    former = None
    while running := [thread for thread in threads if thread.is_alive()]:
        progress = len(running), sum(map(len, results))
        if progress == former:
            return False
        former = progress
        running[0].join(patience)
    return True


def call_at_once(
    calls: Sequence[Callable[[], Results]],
    functions: float,
    begin: Callable[[], None] = lambda: None,
    patience: float | None = None,
) -> tuple[int, list[list[Results]]]:
    """Call each of `calls` repeatedly from its own thread, all at once.

    Return the planned number of calls of each thread, and the results. There are fewer results if the calls take longer
    than `costs.MOST_SECONDS`.

    Args:
        calls: the function that each thread calls. The first was called before.
        functions: the budget of a thread's calls, as in `FUNCTIONS`.
        begin: called in each thread first.
        patience: in seconds; by default `PATIENCE`.

    Raises:
        NeverReturns: a thread has not ended.
        BaseException: an exception that a thread raised.
    """
    cost = costs.functions_called(calls[0])
    count, share = costs.calls_within(functions, CALL + cost, CALLS), TURNS / max(cost, TURNS)
    results: list[list[Results]] = [[] for _ in calls]
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(place: int) -> None:
        try:
            begin()
            start.wait()
            sys.setprofile(_Turns(share, place))
            for _ in range(count):
                results[place].append(calls[place]())
                if time.monotonic() > deadline:
                    break
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    deadline = time.monotonic() + costs.MOST_SECONDS
    for thread in threads:
        thread.start()
    all_returned = _join_all(threads, results, PATIENCE if patience is None else patience)
    if errors:
        raise errors[0]
    if not all_returned:
        raise NeverReturns(f"of {len(calls)} threads that call at once some never return")
    return count, results
