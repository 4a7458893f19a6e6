"""The append-only file of results: a sealed line for each judged candidate.

A candidate has the rights of the user, and may find the file and write into it. The seal of a line needs a key that no
process of a candidate is given, so that a forged line is detected, named and not taken for a result.
"""

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import warnings
import zlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from fourfold.engine.verdict import Verdict

# The field of a line with its seal, and the length of a key and of a seal in bytes.
SEAL, KEY_BYTES, SEAL_BYTES = "seal", 32, 16
# The most forged lines that a warning names.
MOST_NAMED = 10


class InUse(Exception):
    """Another run writes into the file."""


class ForgedLines(UserWarning):
    """The file has lines that no run of this user wrote."""


def seal_key() -> bytes:
    """Return this user's key of seals, which is made once: ``$XDG_STATE_HOME/fourfold/seal``, readable by the user.

    Raises:
        OSError: it cannot be kept.
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(state, "fourfold", "seal")
    if not file.is_file() or file.stat().st_size != KEY_BYTES:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"seal-{os.getpid()}")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(new, file)  # another run may have made one in the meantime
        except FileExistsError:
            if file.stat().st_size != KEY_BYTES:
                os.replace(new, file)
        new.unlink(missing_ok=True)
    return file.read_bytes()


@dataclass(frozen=True, kw_only=True)
class Graded(Verdict):
    """The verdict on one candidate of many.

    Attributes:
        id: the candidate's.
        key: a key that candidates share if they are judged in the same way, whatever their ids.
        stage: the last one: "static", "smoke", "full" or "speed".
        same_as: the id of the candidate of the same key that was judged in its place; "" if it was judged itself.
        attempts: the number of attempts: more than one if a worker was lost.
        worker: the machine and the process that judged it.
        repeat: the command that judges it again, with the same cases.
    """

    id: str = ""
    key: str = ""
    stage: str = ""
    same_as: str = ""
    attempts: int = 1
    worker: str = ""
    repeat: str = ""

    @classmethod
    def of(cls, verdict: Verdict, **details: Any) -> Self:
        """Extend a verdict by further fields."""
        return cls(**{field.name: getattr(verdict, field.name) for field in fields(Verdict)} | details)

    def line(self) -> str:
        """Return the result as a line of the file."""
        fields = json.loads(self.json())
        first = {"id": self.id, "kind": self.kind, "reward": self.reward()}
        return json.dumps(first | {name: value for name, value in fields.items() if name not in first})


class Shelf(MutableMapping[str, Graded]):
    """Compressed results by name. Each takes some hundred bytes, so that a run of a million fits into memory."""

    def __init__(self) -> None:
        self._packed: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> Graded:
        return Graded.from_json(zlib.decompress(self._packed[name]).decode())

    def __setitem__(self, name: str, graded: Graded) -> None:
        self._packed[name] = zlib.compress(graded.line().encode())

    def __delitem__(self, name: str) -> None:
        del self._packed[name]

    def __contains__(self, name: object) -> bool:
        return name in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


class Results:
    """The file of results, for one run at a time.

    Args:
        path: the file, which need not exist. An unfinished last line is cut off.

    Attributes:
        forged: the lines that no run of this user wrote, as "line 3 (id 'a')". They are no results.

    Raises:
        InUse: another run uses it.
        ValueError: a line before the last is no result, and no line is one of this user's runs.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._key, self.forged = path, seal_key(), list[str]()
        self._digest = hashlib.blake2b()  # of the whole file
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise InUse(f"{path} is in use by another run") from None
        self.known, self.keys = Shelf(), dict[str, str]()  # by id; the last of several results wins
        for graded in self._read_lines():
            self._know(graded)
        self._warn()

    def _read_lines(self) -> Iterator[Graded]:
        """Yield the results whose seals are right, and note the other lines."""
        self._file.seek(0)
        sealed, first_error = bool(self.keys), None
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                if sealed or first_error is None:  # otherwise it is a file of something else
                    self._file.truncate(self._file.tell() - len(line))
                break
            self._digest.update(line)
            try:
                graded = Graded.from_json(line.decode())
            except ValueError as error:
                first_error = first_error or ValueError(f"{self.path}, line {number}: {error}")
                self.forged.append(f"line {number}")
                continue
            entry = json.loads(line)
            if hmac.compare_digest(str(entry.pop(SEAL, "")).encode(), self._seal(entry).encode()):
                sealed = True
                yield graded
            else:
                self.forged.append(f"line {number} (id {graded.id!r})")
        if first_error is not None and not sealed:
            raise first_error

    def _seal(self, fields: dict[str, Any]) -> str:
        """Return the seal of a line's fields, whatever their order and the spaces between them."""
        text = json.dumps(fields, sort_keys=True).encode()
        return hashlib.blake2b(text, key=self._key, digest_size=SEAL_BYTES).hexdigest()

    def _warn(self) -> None:
        if self.forged:
            lines = ", ".join(self.forged[:MOST_NAMED]) + (", ..." if len(self.forged) > MOST_NAMED else "")
            message = f"{self.path}: no run of this user wrote {lines}: not taken for results"
            warnings.warn(message, ForgedLines, stacklevel=2)

    def append(self, graded: Graded) -> None:
        """Append a result, and flush it to the disk."""
        fields = json.loads(graded.line())
        line = json.dumps({**fields, SEAL: self._seal(fields)}).encode() + b"\n"
        self._digest.update(line)
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._know(graded)

    def _know(self, graded: Graded) -> None:
        self.known[graded.id], self.keys[graded.id] = graded, graded.key

    def close(self) -> None:
        """Close the file, so that other runs can use it; warn of lines that others have written into it."""
        try:
            self._file.seek(0)
            if hashlib.file_digest(self._file, hashlib.blake2b).digest() != self._digest.digest():
                self.forged.clear()
                for _ in self._read_lines():
                    pass
                self._warn()
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
