"""The weakest claims within which an implementation passes a check that it failed."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from fourfold.candidates.integrity.escapes import held
from fourfold.candidates.process.first_process import Unanswered
from fourfold.checks.grades import Imprecise
from fourfold.checks.search import Search, Subject
from fourfold.operations.boundary import LAYOUTS
from fourfold.operations.case import Case
from fourfold.operations.claims import STORAGE, Claims
from fourfold.operations.not_reached import NotReached
from fourfold.operations.outcomes import Unsupported, Vacuous
from fourfold.operations.refusals import Escape, Refusals, has_lost_device

ACCURACY, LANES = Claims(accuracy=STORAGE), Claims(undefined_lanes_are_zero=True)
# The claims that exclude cases. The claim that users give up least readily comes first, and is dropped first.
LIMITS = (LAYOUTS["contiguous"], Claims(largest=1e4), Claims(finite=True))
# Errors after which nothing holds: they say nothing of the results, or other cases would raise them as well.
_HOPELESS = (Unsupported, NotReached, Vacuous, Unanswered, Escape)
Judge = Callable[[Subject, Search], None]


@dataclass(frozen=True)
class _Attempt:
    """A check's failure: its error, and the case, if there is one."""

    error: BaseException
    case: Case | None


def weakest_claims(judge: Judge, subject: Subject, search: Search, error: BaseException) -> Claims | None:
    """Run a failed check again within claims; return the subject's with the weakest further ones that pass, or None.

    Only claims that exclude a case that failed are tried. An implementation that is wrong for finite and moderate
    numbers in contiguous tensors fails with such a case, so that a few calls, or none, decide.

    Args:
        judge: the check, see `Check.judge`.
        subject: the implementation.
        search: the search that failed.
        error: the failure.
    """
    failures, claimed = [_Attempt(error, search.failing)], list[Claims]()
    while failures:
        more = [claim for claim in _remedies(subject, failures[-1], claimed) if not _is_moot(claim, search)]
        if not more:
            return None
        claimed += more
        if (failure := _attempt(judge, subject, search, claimed)) is None:
            break
        failures.append(failure)
    for claim in [each for each in (*LIMITS, LANES) if each in claimed]:
        without = [[each for each in claimed if each is not claim]]
        if claim is LAYOUTS["contiguous"]:
            without.append([LAYOUTS["aligned"], *without[0]])
        for fewer in without:
            if all(_is_remedied(subject, failure, fewer) for failure in failures):
                if (failure := _attempt(judge, subject, search, fewer)) is None:
                    claimed = fewer
                    break
                failures.append(failure)
    return reduce(Claims.joined, claimed, subject.claims)


def _remedies(subject: Subject, failure: _Attempt, claimed: Sequence[Claims]) -> Iterator[Claims]:
    """Yield further claims within which a failure may not happen."""
    if isinstance(failure.error, _HOPELESS) or has_lost_device(failure.error):
        return
    if isinstance(failure.error, Imprecise):
        yield ACCURACY
        return
    excluding = [claim for claim in LIMITS if claim not in claimed and _excludes(claim, subject, failure.case)]
    yield from excluding
    if not excluding and subject.device == "cpu" and LANES not in claimed:
        yield LANES


def _is_remedied(subject: Subject, failure: _Attempt, claimed: Sequence[Claims]) -> bool:
    """Return whether some of the claims may be a remedy for a failure."""
    if isinstance(failure.error, Imprecise):
        return ACCURACY in claimed
    return LANES in claimed or any(_excludes(claim, subject, failure.case) for claim in claimed)


def _is_moot(claim: Claims, search: Search) -> bool:
    """Return whether the check gives its tensors other layouts than the case says."""
    return search.lays_out and claim is LAYOUTS["contiguous"]


def _excludes(claim: Claims, subject: Subject, case: Case | None) -> bool:
    return case is not None and claim.excludes(subject.operation, case, subject.dtype)


def _attempt(judge: Judge, subject: Subject, search: Search, claimed: Sequence[Claims]) -> _Attempt | None:
    """Run the check within claims; return its failure, or None if it passes."""
    claims = reduce(Claims.joined, claimed)
    again = Search(
        examples=search.examples,
        seed=search.seed,
        keeps=False,
        shrinks=False,
        finite_specials=True,
        note=search.note,
        refusals=None if search.refusals is None else Refusals(),
    )
    try:
        with held(), _undefined_lanes(subject.device, claims.undefined_lanes_are_zero):
            judge(subject.within(claims), again)
    except (Exception, NotReached) as error:
        return _Attempt(error, again.failing)
    return None


@contextlib.contextmanager
def _undefined_lanes(device: str, are_zero: bool) -> Iterator[None]:
    """Fill undefined lanes with zeros inside the block on a CPU, if `are_zero`."""
    if device != "cpu" or not are_zero:
        yield
        return
    memory = importlib.import_module("fourfold.backends.triton.interpreter.memory")
    before = memory.are_undefined_lanes_zero()
    memory.undefined_lanes_are_zero(True)
    try:
        yield
    finally:
        memory.undefined_lanes_are_zero(before)
