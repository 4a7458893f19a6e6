"""What a process that runs kernels leaves behind, for those who look into its death."""

import atexit
import contextlib
import faulthandler
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from fourfold.compat import pytest_internals
from fourfold.pytest_plugin.identity import Identity

# Past a time limit Python is interrupted first; it has as long again to heed that.
MOST_GRACE_SECONDS = 30.0
_TIMED_OUT = "had to be ended:"
SILENT = "ended without a word: it called exit, or was killed"


def own_frames(trace: str) -> str:
    """Of what faulthandler has written, the frames between a kernel and its test."""
    frames = trace.partition("Extension modules")[0].strip().splitlines()
    ends = (number for number, line in enumerate(frames) if pytest_internals.is_own_frame(line))
    return "\n".join(frames[: next(ends, None)])


@dataclass(frozen=True)
class Found:
    """What a process that has died leaves behind.

    Attributes:
        cause: why, as far as it could say.
        case: that it was at.
        path: the file of the test that it ran.
        identity: what that test is for.
        importing: the candidate that it imported, before any test.
    """

    cause: str
    case: str
    path: Path | None
    identity: Identity | None
    importing: str

    @property
    def timed_out(self) -> bool:
        """Whether it was ended because it had not come to its end."""
        return self.cause.startswith(_TIMED_OUT)


class BlackBox:
    """What a process leaves behind for those who look into its death.

    Args:
        folder: an existing one, of this process alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last = ""  # the case, as it is told
        self._case: IO[bytes] | None = None
        self._test: IO[bytes] | None = None
        self._words: IO[str] | None = None

    def open(self) -> None:
        """From here on a fatal signal, too, leaves its trace."""
        if self._words is None:
            self._case = (self.folder / "case").open("wb", buffering=0)
            self._test = (self.folder / "test").open("wb", buffering=0)
            self._words = (self.folder / "words").open("w")
        faulthandler.enable(self._words, all_threads=False)

    def case(self, text: str) -> None:
        """The process is about to run a kernel on this case."""
        self.last = text
        _write_anew(self._case, text)

    def test(self, item: pytest.Item) -> None:
        """The process is about to run this test."""
        identity = Identity.of_item(item)
        told = {"path": str(item.path), "identity": identity.as_dict() if identity else None}
        _write_anew(self._test, json.dumps(told))

    def importing(self, candidate: str) -> None:
        """The process is about to import a candidate, or, with "", has done so."""
        _write_anew(self._test, json.dumps({"importing": candidate}))

    def say(self, text: str) -> None:
        """A reason for which the process is going to end."""
        if self._words is not None:
            self._words.write(text + "\n")
            self._words.flush()

    def expect_within(self, seconds: float) -> None:
        """End the process some time after a time limit, unless `expect_nothing` is called.

        Needs neither Python's lock nor its loop.
        """
        if self._words is not None:
            limit = seconds + min(seconds, MOST_GRACE_SECONDS)
            faulthandler.dump_traceback_later(limit, exit=True, file=self._words)

    def expect_nothing(self) -> None:
        """The process may take as long as it likes."""
        faulthandler.cancel_dump_traceback_later()

    def found(self) -> Found:
        """Of a process that has died."""
        test: dict[str, Any] = {}
        with contextlib.suppress(json.JSONDecodeError):  # it ran none yet
            test = json.loads(self._read("test"))
        identity = Identity.of_dict(test["identity"]) if test.get("identity") else None
        path = Path(test["path"]) if test.get("path") else None
        return Found(self._cause(), self._read("case"), path, identity, test.get("importing", ""))

    def _cause(self) -> str:
        words = self._read("words")
        for pattern, cause in (
            (r"Fatal Python error: (.*)", "died of: {}"),
            (r"Timeout \((\S+)\)!", _TIMED_OUT + " it did not come back within {}, its time limit and a grace"),
            (r"(lost the device: .*)", "{}"),
        ):
            if match := re.search(pattern, words):
                where = own_frames(words[match.end() :])
                return cause.format(match[1]) + (f"\n{where}" if where else "")
        return SILENT

    def _read(self, name: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_text(errors="replace")
        return ""


def _write_anew(file: IO[bytes] | None, text: str) -> None:
    if file is not None:
        encoded = text.encode()
        os.pwrite(file.fileno(), encoded, 0)
        os.ftruncate(file.fileno(), len(encoded))


def new_folder() -> Path:
    """A folder that this process, and none that is forked from it, removes when it ends."""
    folder, owner = tempfile.mkdtemp(prefix="fourfold-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)
