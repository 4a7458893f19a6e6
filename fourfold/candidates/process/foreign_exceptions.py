"""Exceptions of a candidate's process, recreated in the judge's process from their descriptions."""

import traceback
from collections.abc import Mapping

from fourfold.candidates.frames import FRAMES_ELSEWHERE
from fourfold.candidates.integrity.escapes import Escape
from fourfold.candidates.process.protocol import Cause, Raised
from fourfold.candidates.process.session import AnsweredWrongly
from fourfold.instruments.tampering import Tampered
from fourfold.operations.blame import Blame, mark
from fourfold.operations.refusals import Fault
from fourfold.processes.child import printable

# The builtin exceptions that callers distinguish. Each can be made from only a message.
BASES: Mapping[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, Exception, FloatingPointError),
        *(ImportError, IndexError, KeyError, LookupError, MemoryError, ModuleNotFoundError, NameError),
        *(NotImplementedError, OSError, OverflowError, RecursionError, ReferenceError, RuntimeError, TypeError),
        *(UnboundLocalError, ValueError, ZeroDivisionError),
    )
}


def _class(name: str, base: type[Exception], fault: bool) -> type[Exception]:
    bases = (base, Fault) if fault and base is not Exception else (Fault if fault else base,)
    # A KeyError would show its message as the key that it is.
    return type(name, bases, {"__str__": lambda self: str(self.args[0])})


def exception(description: Raised) -> Exception:
    """Recreate an exception from its description: with the same name, message and builtin base."""
    if not description.causes:
        return AnsweredWrongly("crashed: the candidate's process answered out of turn: an exception without a type")
    errors = [_exception_of(cause) for cause in description.causes[:8]]
    error = errors[0]
    if description.escape:
        text = f": {error}" if str(error) else ""
        error = Escape(f"the call raised {type(error).__name__}{text}")
    elif description.tampered:
        error = Tampered(str(error))
    else:
        for (effect, origin), next_error in zip(zip(errors, description.causes), errors[1:]):
            effect.__cause__, effect.__context__ = (next_error, None) if origin.caused else (None, next_error)
    mark(error, Blame.BUG if isinstance(error, Escape | Tampered) else _blame(description.blame))
    # Given the line's text, Python does not read the file, whatever its name is.
    frames = [
        traceback.FrameSummary(printable(file), line, printable(name), lookup_line=False, line=printable(text) or " ")
        for file, line, name, text in description.frames
    ]
    setattr(error, FRAMES_ELSEWHERE, frames)
    return error


def _blame(name: str) -> Blame:
    """Return who is to blame, as the process reports it. It can accuse only the candidate."""
    return Blame(name) if name in (Blame.REFUSAL.value, Blame.LACK.value, Blame.HARNESS.value) else Blame.BUG


def _exception_of(cause: Cause) -> Exception:
    base = next((BASES[name] for name in cause.bases if name in BASES), Exception)
    type_name = cause.type if cause.type.isidentifier() and len(cause.type) < 100 else "Exception"
    error = _class(type_name, base, cause.fault)(printable(cause.words))
    if cause.line is not None:
        error.line = cause.line  # type: ignore[attr-defined]
    return error
