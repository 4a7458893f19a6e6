"""How much calls cost, counted: the same number of calls is made on an idle machine and on a busy one."""

import gc
import itertools
import sys
from collections.abc import Callable
from typing import Any

from fourfold.operations.not_reached import NotReached

# Seconds of the clock after which no further call is made.
MOST_SECONDS = 60.0


def functions_called(call: Callable[[], Any]) -> int:
    """Count the functions that a call calls in its thread, twice each: where it is called, and where it returns."""
    events, before, collects = itertools.count(), sys.getprofile(), gc.isenabled()
    gc.disable()  # a collection calls functions of others, at any time
    sys.setprofile(lambda frame, event, argument: next(events) and None)
    try:
        call()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return next(events)


def calls_within(budget: float, cost: float, most: int) -> int:
    """The number of calls, each of a cost, that a budget allows: `most`, or a half, a quarter of it, but at least one.

    A small change of the cost, as from one version of Python to the next, hardly ever changes it.
    """
    while most > 1 and most * cost > budget:
        most //= 2
    return most


def need_all(made: int, wanted: int) -> None:
    """Pass over a case of which fewer calls were made than were to be.

    Raises:
        NotReached: so it is.
    """
    if made < wanted:
        raise NotReached(f"{wanted} calls take longer than {MOST_SECONDS:g} s", lasts=True)
