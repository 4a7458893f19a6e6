"""Run one check of one implementation, and sum up its outcome, for every user of the engine."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from fourfold.candidates.integrity.escapes import convert_escapes
from fourfold.checks.catalogue import Check
from fourfold.checks.search import Search, Subject
from fourfold.engine.diagnosis import diagnose
from fourfold.engine.failures import finding
from fourfold.engine.shortcomings import join_names
from fourfold.engine.verdict import Outcome
from fourfold.engine.weakest_claims import Judge, weakest_claims
from fourfold.instruments.tampering import Tampered, preserve_random_state
from fourfold.operations.blame import Blame, recorded_blame
from fourfold.operations.claims import EXACT, STORAGE, Claims
from fourfold.operations.not_reached import NotReached
from fourfold.operations.outcomes import BRIEFLY, WRONG, Exclusion, Failure, Kind, Status, Unsupported
from fourfold.operations.refusals import Fault

# The grade of an implementation by the kind of its failure, if that is not wrong.
_GRADES = {Kind.IMPRECISE: STORAGE, Kind.UNDECIDED: EXACT}


def run(
    check: Check,
    dtype: str,
    subject: Callable[[], Subject],
    search: Search,
    origin: Path,
    changes: Callable[[], Collection[str]],
    last: Callable[[], str],
) -> Outcome:
    """Run a check; return its outcome.

    Args:
        check: the check.
        dtype: the name of the subject's dtype.
        subject: returns the subject, which may call the implementation.
        search: the limits of the search.
        origin: see `outcome_of`.
        changes: see `containment`.
        last: returns the last case, as text.
    """
    error: BaseException | None = None
    try:
        with containment(changes):
            judge(check.judge, subject(), search)
    except (Exception, NotReached) as exception:
        error = exception
    return outcome_of(error, check.name, dtype, search, origin, last())


def judge(check: Judge, subject: Subject, search: Search) -> None:
    """Run a check; if the subject fails, examine the failure."""
    try:
        with convert_escapes():
            check(subject, search)
    except Exception as error:
        examine(check, subject, search, error)
        raise


def seeks_claims(failures: Iterable[Outcome]) -> bool:
    """Return whether a failed check looks for claims within which it holds: unless an earlier failed check has none."""
    return all(failure.holds for failure in failures)


def claims_needed(failures: Iterable[Outcome]) -> Claims | None:
    """Return the claims that failed checks need together; None if they need none."""
    claims = [Claims.parse(failure.holds) for failure in failures if failure.holds]
    return functools.reduce(Claims.join, claims) if claims else None


def examine(check: Judge, subject: Subject, search: Search, error: Exception) -> None:
    """Find out why a foreign implementation did not pass a check, and within which claims it would: see `Search`."""
    if isinstance(error, Unsupported) and error.exclusion is Exclusion.FORWARD_ONLY:
        search.holds = subject.claims.join(Claims(gradients=False))
    accuses = isinstance(error, Failure | Fault) or recorded_blame(error) in (Blame.BUG, Blame.REFUSAL)
    if not subject.foreign or not accuses:
        return
    if isinstance(error, Failure) and error.result:
        diagnose(search)
    if search.seeks_claims and not search.blob and search.case is None:
        with preserve_random_state():
            search.holds = weakest_claims(check, subject, search, error)
    if search.failing is not None:
        search.note(search.failing)


@contextlib.contextmanager
def containment(changes: Callable[[], Collection[str]], *but: type[BaseException]) -> Iterator[None]:
    """Keep an implementation that is called inside the block from ending the run, and detect tampering.

    Args:
        changes: returns the names of what the implementation changed of the program that judges it.
        but: exceptions that propagate unchanged, see `convert_escapes`.

    Raises:
        Tampered: the implementation changed something, whatever else the block raised.
    """
    error: BaseException | None = None
    try:
        with preserve_random_state(), convert_escapes(*but):
            yield
    except (Exception, NotReached) as exception:
        error = exception
    if names := changes():
        raise Tampered(f"the candidate changed what judges it: {join_names(dict.fromkeys(names))}") from None
    if error is not None:
        raise error


def outcome_of(
    error: BaseException | None, check: str, dtype: str, search: Search | None, origin: Path, last: str
) -> Outcome:
    """Return the outcome of a check that has ended.

    Args:
        error: the exception that ended it; None if it returned.
        check: its name.
        dtype: the dtype's name.
        search: its search; None for a test of a cell that does not search for cases.
        origin: the file or folder of the implementation.
        last: the last case, as text; "" if there is none.
    """
    outcome = Outcome(check=check, dtype=dtype, outcome=Status.PASSED)
    if search is not None:
        unreached_lines = search.unreached.lines()
        outcome = replace(
            outcome,
            grade=search.grade,
            worst=search.worst,
            examples=search.ran,
            refusals={} if search.refusals is None else dict(search.refusals.counts),
            seconds=round(search.seconds, 3),
            holds="" if search.holds is None else str(search.holds),
            remarks=(*search.remarks, *unreached_lines),
            search={
                "warnings": search.warnings,
                "remarks": search.remarks,
                "reproduces": bool(search.blob),
                "unreached": unreached_lines,
                "constants": search.constants,
                "boundary": search.boundary.as_dict(),
            },
        )
    if isinstance(error, Unsupported | NotReached):
        return replace(outcome, outcome=error.status, reason=str(error), exclusion=error.exclusion)
    if error is not None:
        failing = search.failing if search is not None else None
        failure = finding(
            error, origin, search.describe(failing) if search is not None and failing is not None else last
        )
        if search is not None and failing is not None:
            failure = replace(failure, arguments=failing.arguments(search.takes_cotangent))
        if search is not None and search.case is not None:
            failure = replace(failure, blob=None)  # it repeats generated cases alone
        elif search is not None and failure.blob and search.limit:
            failure = replace(failure, blob=f"{search.limit}-{failure.blob}")
        if search is not None and failure.kind in (Kind.WRONG, Kind.IMPRECISE) and failure.result:
            # A law or a later check may fail by the same wrong result.
            cause = f"{search.wrong_result} is wrong" if search.wrong_result and not failure.frames else failure.cause
            failure = replace(failure, cause=cause, likely_cause=search.likely_cause)
        return replace(outcome, outcome=Status.FAILED, failure=failure, grade=_GRADES.get(failure.kind, WRONG))
    if search is not None and search.brief:
        return replace(outcome, outcome=Status.UNSUPPORTED, reason=BRIEFLY)
    return outcome
