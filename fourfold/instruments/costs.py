"""Costs of calls, counted instead of measured: an idle machine and a busy one make the same number of calls."""

import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from fourfold.operations.not_reached import NotReached

# Seconds of the clock after which no further call begins.
MOST_SECONDS = 60.0


def functions_called(call: Callable[[], Any]) -> int:
    """Count the function calls within a call in its thread, twice each: at the call and at the return."""
    events, profiler, collects = itertools.count(), sys.getprofile(), gc.isenabled()
    gc.disable()  # a collection may call other functions at any time
    sys.setprofile(lambda frame, event, argument: next(events) and None)
    try:
        call()
    finally:
        sys.setprofile(profiler)
        if collects:
            gc.enable()
    return next(events)


def living_tensors(keep_garbage: bool) -> int:
    """Count the tensors that Python holds.

    Two counts, the first with `keep_garbage` and the second without it, tell how many more tensors are alive. Garbage
    from before the first count is in both, so that only what was made between them has to be searched for garbage.

    Args:
        keep_garbage: exclude all present objects from garbage collection until the next call without it.
    """
    if not keep_garbage:
        gc.collect()
    gc.unfreeze()  # frozen objects, of a first count without a second one too, are in no list
    kinds = Counter(map(type, gc.get_objects()))
    if keep_garbage:
        gc.freeze()
    return sum(count for kind, count in kinds.items() if issubclass(kind, torch.Tensor))


def calls_within(budget: float, cost: float, limit: int) -> int:
    """Return how many calls a budget allows: `limit`, a half, a quarter of it and so on, but at least one.

    A small change of the cost, such as between versions of Python, hardly ever changes the result.
    """
    while limit > 1 and limit * cost > budget:
        limit //= 2
    return limit


def require_calls(count: int, expected: int) -> None:
    """Skip a case if fewer calls were made than required.

    Raises:
        NotReached: fewer calls were made.
    """
    if count < expected:
        raise NotReached(f"{expected} calls take longer than {MOST_SECONDS:g} s", lasts=True)
