"""Classify failures: their kind, message, grade, counterexample and cause."""

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from fourfold.candidates.frames import cause, format_frames, innermost_error, own_frames, words
from fourfold.candidates.integrity.escapes import Escape
from fourfold.candidates.process.first_process import Unanswered
from fourfold.checks.grades import Imprecise
from fourfold.compat import hypothesis_internals
from fourfold.engine.cells import SelectionError
from fourfold.engine.verdict import Finding
from fourfold.instruments.tampering import Tampered
from fourfold.operations.blame import Blame, recorded_blame, statement
from fourfold.operations.outcomes import Failure, Kind, Vacuous
from fourfold.operations.refusals import Fault

# Errors that say nothing of the implementation: who is to blame, and the start of the message.
UNDECIDED_BY = {
    Blame.DEFINITION: "cannot judge: the definition, and not the kernel, raised",
    Blame.LACK: "cannot judge, as it is interpreted or emulated here",
    Blame.HARNESS: "cannot judge: Fourfold, and not the kernel, raised (please report it)",
}

# What differs from case to case and from dtype to dtype in a message.
_NUMBERS_AND_DTYPES = re.compile(r"\d+(\.\d+)?(e[+-]\d+)?|float\d+|bfloat16")


def kind_of(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> Kind:
    """Return the kind of a failure.

    Args:
        error: the exception that failed a check.
        frames: those of the implementation's own code. If there are none, an exception without a marked cause is the
            harness's.
    """
    if isinstance(error, Unanswered):
        return error.kind
    if isinstance(error, Tampered):
        return Kind.TAMPERED
    if isinstance(error, Vacuous) or blame_for_undecided(error, frames):
        return Kind.UNDECIDED
    return Kind.IMPRECISE if isinstance(error, Imprecise) else Kind.WRONG


def blame_for_undecided(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> Blame | None:
    """Return the blame for an error that says nothing of the implementation, or None for any other error."""
    blame = recorded_blame(error)
    if blame is None and not frames and not isinstance(error, AssertionError | Fault | SelectionError):
        blame = Blame.HARNESS
    return blame if blame in UNDECIDED_BY else None


def failure_message(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the message of a failure: a check's own, or the exception with who is to blame for it."""
    if isinstance(error, Failure | Escape | SelectionError | Tampered | Unanswered):
        return words(error)
    innermost = innermost_error(error)
    description = f"{type(innermost).__name__}: {words(innermost) or statement(innermost)}"
    blame = blame_for_undecided(error, frames)
    return f"{UNDECIDED_BY[blame]}: {description}" if blame else description


def notes_of(error: BaseException) -> str:
    """Return the notes of an error."""
    return "\n".join(map(str, getattr(error, "__notes__", [])))


def finding(error: BaseException, origin: Path, case: str) -> Finding:
    """Return the finding of a failed check.

    Args:
        error: the exception that failed it.
        origin: the file or folder of the implementation.
        case: the case that failed, as text; "" if there is none.
    """
    frames = own_frames(error, origin)
    message = failure_message(error, frames)
    # Hypothesis groups the failures of a case that does not always fail.
    together = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
    result, worst = next(((part.result, part.worst) for part in together if isinstance(part, Failure)), ("", 0.0))
    of_result = f"{result} is wrong" if result else _NUMBERS_AND_DTYPES.sub("N", message)
    return Finding(
        message=message,
        counterexample=case or None,
        frames=format_frames(frames),
        cause=cause(innermost_error(error), frames) if frames else of_result,  # one wrong result fails many checks
        blob=hypothesis_internals.find_blob(notes_of(error)),
        kind=kind_of(error, frames),
        result=result if worst else "",
    )
