"""The weakest claims within which an implementation passes a check that it failed."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from fourfold.candidates.integrity.escapes import convert_escapes
from fourfold.candidates.process.first_process import Unanswered
from fourfold.checks.grades import Imprecise
from fourfold.checks.search import GRADIENT_OF, Search, Subject
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.boundary import LAYOUTS
from fourfold.operations.case import Case
from fourfold.operations.claims import STORAGE, Claims
from fourfold.operations.not_reached import NotReached
from fourfold.operations.outcomes import Failure, Refused, Unclaimed, Unsupported, Vacuous
from fourfold.operations.refusals import Escape, Refusals, has_lost_device

ACCURACY, LANES = Claims(accuracy=STORAGE), Claims(undefined_lanes_are_zero=True)
FORWARD_ONLY, NONEMPTY = Claims(gradients=False), Claims(empty=False)
# The claims that exclude cases, besides the ranks. The claim that users give up least readily comes first, and is
# dropped first.
LIMITS = (LAYOUTS["contiguous"], Claims(largest=1e4), Claims(finite=True), NONEMPTY)
# Claims are suggested only if they leave at least this share of the named examples.
LEAST_LEFT = 1 / 4
# Errors after which nothing holds: they say nothing of the results, or other cases would raise them as well.
_HOPELESS = (Unsupported, NotReached, Vacuous, Unanswered, Escape)
Judge = Callable[[Subject, Search], None]


@dataclass(frozen=True)
class _Attempt:
    """A check's failure: its error, the case, if there is one, and whether the check replaces the case's layouts."""

    error: BaseException
    case: Case | None
    lays_out: bool


def weakest_claims(judge: Judge, subject: Subject, search: Search, error: BaseException) -> Claims | None:
    """Run a failed check again within claims; return the subject's with the weakest further ones that pass, or None.

    Only claims that follow from a failure are tried: limits that exclude its case, zeros in undefined lanes if no limit
    does, and a forward pass alone if nothing else helps and a gradient is wrong. An implementation that is wrong for
    finite and moderate numbers in contiguous tensors fails with such a case, so that a few calls, or none, decide. If
    it refuses every case within the limits, the claim is that of the other dtypes.

    Args:
        judge: the check, see `Check.judge`.
        subject: the implementation.
        search: the search that failed.
        error: the failure.
    """
    failures, claimed = [_Attempt(error, search.failing, search.lays_out)], list[Claims]()
    needed = [] if search.needed is None else [search.needed]  # by other checks
    if needed and needed[0].dtypes and subject.dtype.name not in needed[0].dtypes:
        return needed[0]
    if needed and _is_remedied(subject, failures[0], needed) and _attempt(judge, subject, search, needed) is None:
        return subject.claims.join(needed[0])
    while failures:
        more = list(_remedies(subject, failures[-1], claimed))
        if not more:
            return _other_dtypes(subject) if isinstance(failures[-1].error, Refused) else None
        claimed += more
        if (failure := _attempt(judge, subject, search, claimed)) is None:
            break
        failures.append(failure)
    for claim in sorted((each for each in claimed if each not in (ACCURACY, FORWARD_ONLY)), key=_readiness):
        without = [[each for each in claimed if each is not claim]]
        if claim is LAYOUTS["contiguous"]:
            without.append([LAYOUTS["aligned"], *without[0]])
        for fewer in without:
            # Zeros in undefined lanes exclude no case: a kernel that fails at times may pass with them by chance.
            if claim is LANES or all(_is_remedied(subject, failure, fewer) for failure in failures):
                if (failure := _attempt(judge, subject, search, fewer)) is None:
                    claimed = fewer
                    break
                failures.append(failure)
    return reduce(Claims.join, claimed, subject.claims) if claimed and _leave_enough(claimed, subject) else None


def _other_dtypes(subject: Subject) -> Claims | None:
    """Return the subject's claims without its dtype, or None if they leave no other."""
    left = tuple(name for name in subject.claims.dtypes or DTYPES if name != subject.dtype.name)
    return replace(subject.claims, dtypes=left) if left else None


def _readiness(claim: Claims) -> int:
    """Return the place of a claim in the order in which claims are dropped."""
    if claim.ranks:
        return 1
    return 2 * LIMITS.index(claim) if claim in LIMITS else 2 * len(LIMITS)


def _leave_enough(claimed: Sequence[Claims], subject: Subject) -> bool:
    """Return whether the claims exclude only a part of the named examples."""
    every = subject.operation.examples
    left = subject.within(reduce(Claims.join, claimed)).operation.examples if claimed else every
    return len(left) >= LEAST_LEFT * len(every)


def _remedies(subject: Subject, failure: _Attempt, claimed: Sequence[Claims]) -> Iterator[Claims]:
    """Yield further claims within which a failure may not happen."""
    if isinstance(failure.error, _HOPELESS) or has_lost_device(failure.error):
        return
    if isinstance(failure.error, Imprecise):
        if ACCURACY not in claimed:
            yield ACCURACY
        return
    limits = [claim for claim in LIMITS if claim not in claimed and _excludes(claim, subject, failure)]
    excluding = limits or list(_fewer_ranks(subject, failure, claimed))
    yield from excluding
    if excluding:
        return
    if subject.device == "cpu" and LANES not in claimed:
        yield LANES
    elif FORWARD_ONLY not in claimed and _is_of_a_gradient(failure):
        yield FORWARD_ONLY


def _fewer_ranks(subject: Subject, failure: _Attempt, claimed: Sequence[Claims]) -> Iterator[Claims]:
    """Yield the claim of all ranks but the lowest or the highest, if that is a failed case's and others remain."""
    if failure.case is None or not failure.case.inputs:
        return
    ranks = {next(iter(make(subject.dtype).inputs.values())).ndim for make in subject.operation.examples.values()}
    rank = next(iter(failure.case.inputs.values())).ndim
    left = {each for each in ranks - {rank} if all(not claim.ranks or each in claim.ranks for claim in claimed)}
    if left and rank in (min(ranks), max(ranks)):
        yield Claims(ranks=tuple(sorted(ranks - {rank})))


def _is_of_a_gradient(failure: _Attempt) -> bool:
    """Return whether a wrong gradient is the failure."""
    return isinstance(failure.error, Failure) and failure.error.result.startswith(GRADIENT_OF)


def _is_remedied(subject: Subject, failure: _Attempt, claimed: Sequence[Claims]) -> bool:
    """Return whether some of the claims may be a remedy for a failure."""
    if isinstance(failure.error, Imprecise):
        return any(claim.accuracy == STORAGE for claim in claimed)
    if _is_of_a_gradient(failure) and not all(claim.gradients for claim in claimed):
        return True
    are_zero = any(claim.undefined_lanes_are_zero for claim in claimed)
    return are_zero or any(_excludes(claim, subject, failure) for claim in claimed)


def _excludes(claim: Claims, subject: Subject, failure: _Attempt) -> bool:
    """Return whether a claim excludes a failed case, or the layouts that the check gives it."""
    if failure.lays_out and claim.contiguous:
        return True
    return failure.case is not None and claim.excludes(subject.operation, failure.case, subject.dtype)


def _attempt(judge: Judge, subject: Subject, search: Search, claimed: Sequence[Claims]) -> _Attempt | None:
    """Run the check within claims; return its failure, or None if it passes.

    Claims may drop the check if it is of gradients, or if other checks need contiguous tensors. Otherwise a mistake
    that it alone finds would be claimed away, such as offsets of 32 bits by contiguous tensors. An implementation may
    refuse every case of the check if other checks need claims, and pass within them.
    """
    claims = reduce(Claims.join, claimed, Claims())
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
        with convert_escapes(), _fill_undefined_lanes(subject.device, claims.undefined_lanes_are_zero):
            judge(subject.within(claims), again)
    except Unclaimed as error:
        may_drop = not claims.gradients or (search.needed is not None and search.needed.contiguous)
        return None if may_drop else _Attempt(error, None, again.lays_out)
    except (Exception, NotReached) as error:
        if isinstance(error, Refused) and search.needed is not None:
            return None
        return _Attempt(error, again.failing, again.lays_out)
    return None


@contextlib.contextmanager
def _fill_undefined_lanes(device: str, are_zero: bool) -> Iterator[None]:
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
