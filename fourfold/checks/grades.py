"""Grades of accuracy: exact, or storage accuracy like torch, which rounds intermediates to the tensors' dtype."""

import functools
from collections.abc import Callable
from dataclasses import replace

from fourfold.checks.search import Search, Subject
from fourfold.operations.claims import STORAGE
from fourfold.operations.outcomes import Failure

Check = Callable[[Subject, Search], None]


def allow_storage_accuracy(check: Check) -> Check:
    """Return a check that repeats a failed check of results within the bounds of storage accuracy.

    A foreign implementation that is right within these bounds has the grade "storage", which the search records. It
    fails unless it claims that grade. An implementation that is wrong within these bounds, too, fails anyway.
    """

    @functools.wraps(check)
    def run(subject: Subject, search: Search) -> None:
        dtype = subject.dtype.with_rounded_steps
        if not subject.foreign or dtype is subject.dtype or search.blob:
            return check(subject, search)
        try:
            return check(subject, search)
        except Failure as failure:
            retry = replace(search, keeps=False)
            try:
                check(replace(subject, dtype=dtype), retry)
            except Exception as error:
                search.failing, search.subject, search.limit = retry.failing, retry.subject, retry.limit
                raise error from None  # its case fails by both bounds
            search.ran, search.substantial, search.worst = retry.ran, retry.substantial, retry.worst
            search.grade = STORAGE
            if subject.claims.accuracy != STORAGE:
                imprecise = Imprecise(
                    f"{failure}\nThat is storage accuracy: right if each intermediate is rounded to {subject.dtype}."
                    ' The claim accuracy="storage" accepts it.'
                )
                vars(imprecise).update(vars(failure))  # with its notes
                raise imprecise from failure

    return run


class Imprecise(Failure):
    """A failure of an implementation that has storage accuracy and does not claim it."""
