"""Exceptions of a candidate's process, recreated in the judge's process from their descriptions."""

import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from fourfold.candidates.frames import FRAMES_ELSEWHERE
from fourfold.candidates.integrity.escapes import Escape
from fourfold.candidates.process.protocol import printable
from fourfold.candidates.process.session import AnsweredWrongly
from fourfold.instruments.tampering import Tampered
from fourfold.operations.blame import Blame, mark
from fourfold.operations.refusals import Fault

# The builtin exceptions that callers distinguish. Each can be made from only a message.
BASES: Mapping[str, type[Exception]] = {
    each.__name__: each
    for each in (
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


def exception(said: Any) -> Exception:
    """Recreate an exception from its description: with the same name, message and builtin base."""
    causes = said.get("causes") if isinstance(said, dict) else None
    if not isinstance(causes, list) or not causes or not all(isinstance(cause, dict) for cause in causes):
        return AnsweredWrongly("crashed: the candidate's process answered out of turn: an exception without a type")
    made = [_one(cause) for cause in causes[:8]]
    error = made[0]
    if said.get("escape"):
        text = f": {error}" if str(error) else ""
        error = Escape(f"the call raised {type(error).__name__}{text}")
    elif said.get("tampered"):
        error = Tampered(str(error))
    else:
        for (one, of), another in zip(zip(made, causes), made[1:]):
            one.__cause__, one.__context__ = (another, None) if of.get("cause") else (None, another)
    mark(error, Blame.BUG if isinstance(error, Escape | Tampered) else _blame(said.get("blame")))
    setattr(error, FRAMES_ELSEWHERE, list(_frames(said.get("frames"))))
    return error


def _blame(said: Any) -> Blame:
    """Return who is to blame, as the process reports it. It can accuse only the candidate."""
    return Blame(said) if said in (Blame.REFUSAL.value, Blame.LACK.value, Blame.HARNESS.value) else Blame.BUG


def _one(said: Mapping[str, Any]) -> Exception:
    name, bases = said.get("type"), said.get("bases")
    listed = bases if isinstance(bases, list) else []
    base = next((BASES[each] for each in listed if isinstance(each, str) and each in BASES), Exception)
    named = name if isinstance(name, str) and name.isidentifier() and len(name) < 100 else "Exception"
    error = _class(named, base, said.get("fault") is True)(printable(str(said.get("words"))))
    if type(said.get("line")) is int:
        error.line = said["line"]  # type: ignore[attr-defined]
    return error


def _frames(said: Any) -> Iterator[traceback.FrameSummary]:
    for frame in said if isinstance(said, list) else ():
        kinds = (str, int, str, str)
        if isinstance(frame, list) and len(frame) == 4 and all(isinstance(a, b) for a, b in zip(frame, kinds)):
            file, line, name, text = frame
            # Given the line's text, Python does not read the file, whatever its name is.
            yield traceback.FrameSummary(
                printable(file), line, printable(name), lookup_line=False, line=printable(text) or " "
            )
