"""Grades of accuracy: what is not exact may be as exact as torch, which rounds intermediates to the tensors' dtype."""

import functools
from collections.abc import Callable
from dataclasses import replace

from fourfold.checks.search import Search, Subject
from fourfold.operations.claims import STORAGE
from fourfold.operations.outcomes import Failure

Check = Callable[[Subject, Search], None]


def graded(check: Check) -> Check:
    """Let a check of results look a second time at what is not exact, within the bounds of storage accuracy.

    Somebody else's implementation that is right by these bounds has the grade "storage", which the search records. It
    fails unless it claims that grade. What is wrong by these bounds too fails as it did before.
    """

    @functools.wraps(check)
    def run(subject: Subject, search: Search) -> None:
        dtype = subject.dtype.with_rounded_steps
        if not subject.foreign or dtype is subject.dtype or search.blob:
            return check(subject, search)
        try:
            return check(subject, search)
        except Failure as failure:
            again = replace(search, keeps=False)
            try:
                check(replace(subject, dtype=dtype), again)
            except Failure as worse:
                raise worse from None  # what it shows is wrong by both bounds
            search.ran, search.substantial, search.worst = again.ran, again.substantial, again.worst
            search.grade = STORAGE
            if subject.claims.accuracy != STORAGE:
                imprecise = Imprecise(
                    f"{failure}\nThat is storage accuracy: right if each intermediate is rounded to {subject.dtype}."
                    ' The claim accuracy="storage" accepts it.'
                )
                for note in getattr(failure, "__notes__", []):
                    imprecise.add_note(note)
                raise imprecise from failure

    return run


class Imprecise(Failure):
    """An implementation has storage accuracy, and does not claim so."""
