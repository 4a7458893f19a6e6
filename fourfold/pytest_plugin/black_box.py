"""A black box: what a process that runs kernels leaves behind to explain its death."""

import contextlib
import faulthandler
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from fourfold.compat import pytest_internals
from fourfold.pytest_plugin.identity import Identity

# At the time limit Python is interrupted; the process then has the same time again to react, but at most this.
MOST_GRACE_SECONDS = 30.0
_TIMED_OUT = r"Timeout \((\S+)\)!"  # as faulthandler says it
# The mark of a reason that `BlackBox.say` wrote; faulthandler writes the rest of the file.
_SAID = "fourfold: "
SILENT = "ended without a word: it called exit, or was killed"


def own_frames(trace: str) -> str:
    """Return the frames of a faulthandler trace between a kernel and its test."""
    frames = trace.partition("Extension modules")[0].strip().splitlines()
    ends = (number for number, line in enumerate(frames) if pytest_internals.is_own_frame(line))
    return "\n".join(frames[: next(ends, None)])


@dataclass(frozen=True)
class DeathRecord:
    """The record that a dead process left behind.

    Attributes:
        cause: why it died, as far as the record shows.
        case: the case that was running.
        path: the file of the test that was running.
        identity: the identity of that test.
        importing: the candidate that was being imported, before any test.
        timed_out: whether the process was ended because it exceeded its time limit.
    """

    cause: str
    case: str
    path: Path | None
    identity: Identity | None
    importing: str
    timed_out: bool


class BlackBox:
    """A record that a process keeps for those who explain its death.

    Args:
        folder: an existing folder that only this process uses.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last = ""  # the last case, as text
        self._case: IO[bytes] | None = None
        self._test: IO[bytes] | None = None
        self._words: IO[str] | None = None

    def open(self) -> None:
        """Open the files, and record fatal signals from now on."""
        if self._words is None:
            self._case = (self.folder / "case").open("wb", buffering=0)
            self._test = (self.folder / "test").open("wb", buffering=0)
            self._words = (self.folder / "words").open("w")
        faulthandler.enable(self._words, all_threads=False)

    def case(self, text: str) -> None:
        """Record the case that a kernel is about to run on."""
        self.last = text
        _write_anew(self._case, text)

    def test(self, item: pytest.Item) -> None:
        """Record the test that is about to run."""
        identity = Identity.of_item(item)
        record = {"path": str(item.path), "identity": identity.as_dict() if identity else None}
        _write_anew(self._test, json.dumps(record))

    def importing(self, candidate: str) -> None:
        """Record the candidate that is about to be imported; "" after its import."""
        _write_anew(self._test, json.dumps({"importing": candidate}))

    def say(self, text: str) -> None:
        """Record the reason why the process is about to end."""
        if self._words is not None:
            self._words.write(f"{_SAID}{text}\n")
            self._words.flush()

    def expect_within(self, seconds: float) -> None:
        """End the process some time after a time limit, unless `expect_nothing` is called.

        This needs neither Python's lock nor its loop.
        """
        if self._words is not None:
            limit = seconds + min(seconds, MOST_GRACE_SECONDS)
            faulthandler.dump_traceback_later(limit, exit=True, file=self._words)

    def expect_nothing(self) -> None:
        """Cancel the limit of `expect_within`."""
        faulthandler.cancel_dump_traceback_later()

    def read(self, default_cause: str = SILENT) -> DeathRecord:
        """Return the record of a dead process, with the default cause if it recorded none."""
        test: dict[str, Any] = {}
        with contextlib.suppress(json.JSONDecodeError):  # it had not run any test
            test = json.loads(self._read("test"))
        identity = Identity.of_dict(test["identity"]) if test.get("identity") else None
        path = Path(test["path"]) if test.get("path") else None
        cause, timed_out = self._cause()
        return DeathRecord(
            cause or default_cause, self._read("case"), path, identity, test.get("importing", ""), timed_out
        )

    def _cause(self) -> tuple[str, bool]:
        """Return the cause in the record, "" if there is none, and whether it is the time limit."""
        words = self._read("words")
        for pattern, cause in (
            (r"Fatal Python error: (.*)", "died of: {}"),
            (_TIMED_OUT, "had to be ended: it did not come back within {}, its time limit and a grace"),
            (rf"^{_SAID}(.*)", "{}"),
        ):
            if match := re.search(pattern, words, re.MULTILINE):
                frames = own_frames(words[match.end() :])
                return cause.format(match[1]) + (f"\n{frames}" if frames else ""), pattern == _TIMED_OUT
        return "", False

    def _read(self, name: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_text(errors="replace")
        return ""


def _write_anew(file: IO[bytes] | None, text: str) -> None:
    if file is not None:
        encoded = text.encode()
        os.pwrite(file.fileno(), encoded, 0)
        os.ftruncate(file.fileno(), len(encoded))
