"""The part of a traceback that a kernel's author can act on: from the kernel's own file on."""

import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from fourfold.operations.blame import Owner, owner_of

# The attribute of an exception that was raised in another process: its frames there.
FRAMES_ELSEWHERE = "fourfold_frames_elsewhere"


def own_frames(error: BaseException, origin: Path) -> list[traceback.FrameSummary]:
    """Return the frames from the first one in a file or folder on, without those of libraries and of the harness.

    Those of an interpreted kernel are among them.
    """
    frames = getattr(error, FRAMES_ELSEWHERE, None)
    if frames is None:
        frames = [frame for cause in _error_chain(error) for frame in traceback.extract_tb(cause.__traceback__)]
    first = next((place for place, frame in enumerate(frames) if _lies_in(frame, origin)), len(frames))
    return [frame for frame in frames[first:] if _lies_in(frame, origin) or not is_of_a_library(frame)]


def innermost_error(error: BaseException) -> BaseException:
    """Return the error of an interpreted kernel, which Triton's interpreter wraps at each call; others unchanged."""
    *_, innermost = _error_chain(error)
    return innermost


def _error_chain(error: BaseException) -> Iterator[BaseException]:
    yield error
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
        yield error


def format_frames(frames: Sequence[traceback.FrameSummary]) -> str:
    """Format frames as Python does, the innermost last, with recursion shortened."""
    return "".join(traceback.StackSummary.from_list(frames).format()).rstrip()


def cause(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> str:
    """Return a key for exceptions of one kind from one line, whatever the numbers in their messages."""
    (line, *_) = words(error).splitlines() or [""]
    message = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "N", line)
    return f"{frames[-1].filename}:{frames[-1].lineno}: {type(error).__name__}: {message}"


def words(error: BaseException) -> str:
    """Return an exception's message; a candidate's own exception may fail at that, too."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its message cannot be had: {type(failure).__name__})"


def _lies_in(frame: traceback.FrameSummary, origin: Path) -> bool:
    path = Path(frame.filename)
    return path == origin or origin in path.parents


def is_of_a_library(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame belongs to Python, an installed package or the harness."""
    return frame.filename.startswith("<") or owner_of(frame.filename) is not Owner.AUTHOR
