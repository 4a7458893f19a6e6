"""Classify failures: their kind, message, grade and counterexample."""

import re
import traceback
from collections.abc import Sequence

from fourfold.candidates.frames import words
from fourfold.candidates.integrity.escapes import Escape
from fourfold.candidates.process.session import Unanswered
from fourfold.checks.grades import Imprecise
from fourfold.compat import hypothesis_internals
from fourfold.engine.cells import SelectionError
from fourfold.instruments.tampering import Tampered
from fourfold.operations.blame import Blame, marked, statement
from fourfold.operations.claims import EXACT, STORAGE
from fourfold.operations.outcomes import IMPRECISE, TAMPERED, UNDECIDED, WRONG, Failure, Vacuous
from fourfold.operations.refusals import Fault

# Errors that say nothing of the implementation: who is to blame, and the start of the message.
UNDECIDED_BY = {
    Blame.DEFINITION: "cannot judge: the definition, and not the kernel, raised",
    Blame.LACK: "cannot judge, as it is interpreted or emulated here",
    Blame.HARNESS: "cannot judge: Fourfold, and not the kernel, raised (please report it)",
}


def kind_of(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the kind of a failure: "wrong", "imprecise", "undecided", "crashed", "timed out" or "tampered".

    Args:
        error: the exception that failed a check.
        frames: those of the implementation's own code. If there are none, an exception without a marked cause is the
            harness's.
    """
    if isinstance(error, Unanswered):
        return error.kind
    if isinstance(error, Tampered):
        return TAMPERED
    if isinstance(error, Vacuous) or blame_for_undecided(error, frames):
        return UNDECIDED
    return IMPRECISE if isinstance(error, Imprecise) else WRONG


def blame_for_undecided(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> Blame | None:
    """Return the blame for an error that says nothing of the implementation, or None for any other error."""
    blame = marked(error)
    if blame is None and not frames and not isinstance(error, AssertionError | Fault | SelectionError):
        blame = Blame.HARNESS
    return blame if blame in UNDECIDED_BY else None


def failure_message(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the message of a failure: a check's own, or the exception with who is to blame for it."""
    if isinstance(error, Failure | Escape | SelectionError | Tampered | Unanswered):
        return words(error)
    said = f"{type(error).__name__}: {words(error) or statement(error)}"
    blame = blame_for_undecided(error, frames)
    return f"{UNDECIDED_BY[blame]}: {said}" if blame else said


def failure_grade(kind: str) -> str:
    """Return the grade of an implementation by the kind of its failure: "exact" if it is not to blame."""
    return {IMPRECISE: STORAGE, UNDECIDED: EXACT}.get(kind, WRONG)


def counterexample(notes: str) -> str | None:
    """Return the case in an error's notes: our note of a named example, or Hypothesis's of a generated case."""
    named = re.search(r"^Named example .*?: (Case\(.*\))", notes, re.MULTILINE)
    return named[1] if named else hypothesis_internals.argument_in(notes, "case", "Case")
