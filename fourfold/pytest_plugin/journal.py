"""The journal of a process that runs tests: lines in a pipe to its parent, which cannot be withdrawn.

Each line has a number and a seal, so that the parent detects lines that a candidate writes, drops or repeats.
"""

import hashlib
import inspect
import json
import os
import secrets
import threading
from collections.abc import Callable, Collection
from typing import Any

# Saved before a candidate, which may replace them, is loaded.
_chunks = json.JSONEncoder(default=str).iterencode
_write = os.write


class Journal:
    """The writing end of the pipe.

    Args:
        descriptor: of the pipe.
        key: of the seals.
    """

    def __init__(self, descriptor: int, key: bytes) -> None:
        self._descriptor, self._seal, self._number = descriptor, hashlib.blake2b(key=key, digest_size=16), 0
        self.candidates: Callable[[], Collection[str]] = tuple  # source files whose code must not write here

    def write(self, **entry: Any) -> None:
        """Write an entry, marked as forged if a candidate's own code makes the call."""
        files = self.candidates()
        if files and _calls(files):
            entry["forged"] = True
        self._number += 1
        text = "".join(_chunks({"number": self._number, **entry})).encode()
        line = seal_of(self._seal, text) + b" " + text + b"\n"
        while line:
            line = line[_write(self._descriptor, line) :]


def seal_of(seal: Any, text: bytes) -> bytes:
    """Return the seal of a line."""
    copy = seal.copy()
    copy.update(text)
    return copy.hexdigest().encode()


def _calls(files: Collection[str]) -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename in files:
            return True
        frame = frame.f_back
    return False


class Pipe:
    """A pipe to a child, and the lines that came through it.

    Attributes:
        false: the number of lines that were not the run's own.
    """

    def __init__(self) -> None:
        self._from, self._to = os.pipe()
        self._key, self._last = secrets.token_bytes(32), secrets.token_bytes(32)
        self._parts: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.false = 0

    def for_child(self) -> Journal:
        """Return the child's end; call this in the child."""
        os.close(self._from)
        return Journal(self._to, self._key)

    def listen(self) -> None:
        """Start reading; call this once the child exists."""
        self._thread.start()

    def _read(self) -> None:
        while not b"".join(self._parts[-2:]).endswith(self._last):
            self._parts.append(os.read(self._from, 1 << 16))

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of a child that has ended."""
        os.write(self._to, self._last)
        self._thread.join()
        os.close(self._from)
        os.close(self._to)
        seal, number, entries = hashlib.blake2b(key=self._key, digest_size=16), 0, []
        *lines, _ = b"".join(self._parts).removesuffix(self._last).split(b"\n")
        for line in lines:
            claimed_seal, _, text = line.partition(b" ")
            entry = json.loads(text) if secrets.compare_digest(claimed_seal, seal_of(seal, text)) else {}
            if not entry or entry["number"] != number + 1 or entry.get("forged"):
                self.false += 1
                continue
            number += 1
            entries.append(entry)
        return entries
