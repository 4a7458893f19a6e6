"""The append-only file of results: a line for each judged candidate."""

import fcntl
import json
import os
import zlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from fourfold.engine.verdict import Verdict


class InUse(Exception):
    """Another run writes into the file."""


@dataclass(frozen=True, kw_only=True)
class Graded(Verdict):
    """The verdict on one candidate of many.

    Attributes:
        id: the candidate's.
        key: a key that candidates share if they are judged in the same way, whatever their ids.
        stage: the last one: "static", "smoke", "full" or "speed".
        same_as: the id of the candidate of the same key that was judged in its place; "" if it was judged itself.
        attempts: the number of attempts: more than one if a worker was lost.
        where: the machine and the process that judged it.
        repeat: the command that judges it again, with the same cases.
    """

    id: str = ""
    key: str = ""
    stage: str = ""
    same_as: str = ""
    attempts: int = 1
    where: str = ""
    repeat: str = ""

    @classmethod
    def of(cls, verdict: Verdict, **more: Any) -> Self:
        """Extend a verdict by further fields."""
        return cls(**{each.name: getattr(verdict, each.name) for each in fields(Verdict)} | more)

    def line(self) -> str:
        """Return the result as a line of the file."""
        said = json.loads(self.json())
        first = {"id": self.id, "kind": self.kind, "reward": self.reward()}
        return json.dumps(first | {name: value for name, value in said.items() if name not in first})


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

    Raises:
        InUse: another run uses it.
        ValueError: a line before the last is no result.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise InUse(f"{path} is in use by another run") from None
        self.known, self.keys = Shelf(), dict[str, str]()  # by id; the last of several results wins
        for graded in self._read():
            self._know(graded)

    def _read(self) -> Iterator[Graded]:
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                self._file.truncate(self._file.tell() - len(line))
                return
            try:
                yield Graded.from_json(line.decode())
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}: {error}") from None

    def append(self, graded: Graded) -> None:
        """Append a result, and flush it to the disk."""
        self._file.write(graded.line().encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._know(graded)

    def _know(self, graded: Graded) -> None:
        self.known[graded.id], self.keys[graded.id] = graded, graded.key

    def close(self) -> None:
        """Close the file, so that other runs can use it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
