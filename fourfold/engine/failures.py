"""The kind of a failure, its message and grade, and the case that it shows."""

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

# Whose errors say nothing of the implementation, and what is told of them.
UNDECIDED_BY = {
    Blame.DEFINITION: "cannot judge: the definition, and not the kernel, raised",
    Blame.LACK: "cannot judge, as it is interpreted or emulated here",
    Blame.HARNESS: "cannot judge: Fourfold, and not the kernel, raised (please report it)",
}


def kind_of(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> str:
    """What a failure is: "wrong", "imprecise", "undecided", "crashed", "timed out" or "tampered".

    Args:
        error: that a check failed by.
        frames: those of the implementation's own code. Without any, an exception that nobody was found to have raised
            is the harness's.
    """
    if isinstance(error, Unanswered):
        return error.kind
    if isinstance(error, Tampered):
        return TAMPERED
    if isinstance(error, Vacuous) or blame_for_undecided(error, frames):
        return UNDECIDED
    return IMPRECISE if isinstance(error, Imprecise) else WRONG


def blame_for_undecided(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> Blame | None:
    """Whose an error is that says nothing of the implementation; None for any other error."""
    blame = marked(error)
    if blame is None and not frames and not isinstance(error, AssertionError | Fault | SelectionError):
        blame = Blame.HARNESS
    return blame if blame in UNDECIDED_BY else None


def failure_message(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> str:
    """Return what is wrong, in words: a check's message, or the exception and whose it is."""
    if isinstance(error, Failure | Escape | SelectionError | Tampered | Unanswered):
        return words(error)
    said = f"{type(error).__name__}: {words(error) or statement(error)}"
    blame = blame_for_undecided(error, frames)
    return f"{UNDECIDED_BY[blame]}: {said}" if blame else said


def failure_grade(kind: str) -> str:
    """Return the grade of an implementation by the kind of its failure: "exact" if it is not to blame."""
    return {IMPRECISE: STORAGE, UNDECIDED: EXACT}.get(kind, WRONG)


def counterexample(notes: str) -> str | None:
    """The case that the notes of an error show, ours of a named one or Hypothesis's of one that it has found."""
    named = re.search(r"^Named example .*?: (Case\(.*\))", notes, re.MULTILINE)
    return named[1] if named else hypothesis_internals.argument_in(notes, "case", "Case")
