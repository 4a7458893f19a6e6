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
    failures, claims = [_Attempt(error, search.failing, search.lays_out)], list[Claims]()
    needs = [] if search.other_claims is None else [search.other_claims]  # by other checks
    if needs and needs[0].dtypes and subject.dtype.name not in needs[0].dtypes:
        return needs[0]
    if needs and _is_remedied(subject, failures[0], needs) and _attempt(judge, subject, search, needs) is None:
        return subject.claims.join(needs[0])
    while failures:
        remedies = list(_remedies(subject, failures[-1], claims))
        if not remedies:
            return _other_dtypes(subject) if isinstance(failures[-1].error, Refused) else None
        claims += remedies
        if (failure := _attempt(judge, subject, search, claims)) is None:
            break
        failures.append(failure)
    for claim in sorted((claim for claim in claims if claim not in (ACCURACY, FORWARD_ONLY)), key=_readiness):
        subsets = [[c for c in claims if c is not claim]]
        if claim is LAYOUTS["contiguous"]:
            subsets.append([LAYOUTS["aligned"], *subsets[0]])
        for fewer in subsets:
            # Zeros in undefined lanes exclude no case: a kernel that fails at times may pass with them by chance.
            if claim is LANES or all(_is_remedied(subject, failure, fewer) for failure in failures):
                if (failure := _attempt(judge, subject, search, fewer)) is None:
                    claims = fewer
                    break
                failures.append(failure)
    return reduce(Claims.join, claims, subject.claims) if claims and _leave_enough(claims, subject) else None


def _other_dtypes(subject: Subject) -> Claims | None:
    """Return the subject's claims without its dtype, or None if they leave no other."""
    others = tuple(name for name in subject.claims.dtypes or DTYPES if name != subject.dtype.name)
    return replace(subject.claims, dtypes=others) if others else None


def _readiness(claim: Claims) -> int:
    """Return the place of a claim in the order in which claims are dropped."""
    if claim.ranks:
        return 1
    return 2 * LIMITS.index(claim) if claim in LIMITS else 2 * len(LIMITS)


def _leave_enough(claims: Sequence[Claims], subject: Subject) -> bool:
    """Return whether the claims exclude only a part of the named examples."""
    examples = subject.operation.examples
    remaining = subject.within(reduce(Claims.join, claims)).operation.examples if claims else examples
    return len(remaining) >= LEAST_LEFT * len(examples)


def _remedies(subject: Subject, failure: _Attempt, claims: Sequence[Claims]) -> Iterator[Claims]:
    """Yield further claims within which a failure may not happen."""
    if isinstance(failure.error, _HOPELESS) or has_lost_device(failure.error):
        return
    if isinstance(failure.error, Imprecise):
        if ACCURACY not in claims:
            yield ACCURACY
        return
    limits = [claim for claim in LIMITS if claim not in claims and _excludes(claim, subject, failure)]
    excluding = limits or list(_fewer_ranks(subject, failure, claims))
    yield from excluding
    if excluding:
        return
    if subject.device == "cpu" and LANES not in claims:
        yield LANES
    elif FORWARD_ONLY not in claims and _is_of_a_gradient(failure):
        yield FORWARD_ONLY


def _fewer_ranks(subject: Subject, failure: _Attempt, claims: Sequence[Claims]) -> Iterator[Claims]:
    """Yield the claim of all ranks but the lowest or the highest, if that is a failed case's and others remain."""
    if failure.case is None or not failure.case.inputs:
        return
    ranks = {next(iter(make(subject.dtype).inputs.values())).ndim for make in subject.operation.examples.values()}
    rank = next(iter(failure.case.inputs.values())).ndim
    remaining = {r for r in ranks - {rank} if all(not claim.ranks or r in claim.ranks for claim in claims)}
    if remaining and rank in (min(ranks), max(ranks)):
        yield Claims(ranks=tuple(sorted(ranks - {rank})))


def _is_of_a_gradient(failure: _Attempt) -> bool:
    """Return whether a wrong gradient is the failure."""
    return isinstance(failure.error, Failure) and failure.error.result.startswith(GRADIENT_OF)


def _is_remedied(subject: Subject, failure: _Attempt, claims: Sequence[Claims]) -> bool:
    """Return whether some of the claims may be a remedy for a failure."""
    if isinstance(failure.error, Imprecise):
        return any(claim.accuracy == STORAGE for claim in claims)
    if _is_of_a_gradient(failure) and not all(claim.gradients for claim in claims):
        return True
    are_zero = any(claim.undefined_lanes_are_zero for claim in claims)
    return are_zero or any(_excludes(claim, subject, failure) for claim in claims)


def _excludes(claim: Claims, subject: Subject, failure: _Attempt) -> bool:
    """Return whether a claim excludes a failed case, or the layouts that the check gives it."""
    if failure.lays_out and claim.contiguous:
        return True
    return failure.case is not None and claim.excludes(subject.operation, failure.case, subject.dtype)


def _attempt(judge: Judge, subject: Subject, search: Search, parts: Sequence[Claims]) -> _Attempt | None:
    """Run the check within claims; return its failure, or None if it passes.

    Claims may drop the check if it is of gradients, or if other checks need contiguous tensors. Otherwise a mistake
    that it alone finds would be claimed away, such as offsets of 32 bits by contiguous tensors. An implementation may
    refuse every case of the check if other checks need claims, and pass within them.
    """
    claims = reduce(Claims.join, parts, Claims())
    retry = Search(
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
            judge(subject.within(claims), retry)
    except Unclaimed as error:
        may_drop = not claims.gradients or (search.other_claims is not None and search.other_claims.contiguous)
        return None if may_drop else _Attempt(error, None, retry.lays_out)
    except (Exception, NotReached) as error:
        if isinstance(error, Refused) and search.other_claims is not None:
            return None
        return _Attempt(error, retry.failing, retry.lays_out)
    return None


@contextlib.contextmanager
def _fill_undefined_lanes(device: str, are_zero: bool) -> Iterator[None]:
    """Fill undefined lanes with zeros inside the block on a CPU, if `are_zero`."""
    if device != "cpu" or not are_zero:
        yield
        return
    memory = importlib.import_module("fourfold.backends.triton.interpreter.memory")
    were_zero = memory.are_undefined_lanes_zero()
    memory.undefined_lanes_are_zero(True)
    try:
        yield
    finally:
        memory.undefined_lanes_are_zero(were_zero)
