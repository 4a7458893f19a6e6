"""Hypothesis's database of failures, with a place of its own for each search."""

from collections.abc import Iterable

from hypothesis.database import ExampleDatabase


class Filed(ExampleDatabase):
    """A database in which one search finds what it has saved itself, and nothing else.

    Hypothesis files a failure under the source text of its test function. All searches run the same function, so they
    would share one place, where each deletes the failures of the others: on it they pass.

    Args:
        database: where everything is kept.
        name: of the search.
    """

    def __init__(self, database: ExampleDatabase, name: str) -> None:
        super().__init__()
        self._database, self._prefix = database, name.encode() + b": "

    def save(self, key: bytes, value: bytes) -> None:
        """Keep a value under a key."""
        self._database.save(self._prefix + key, value)

    def fetch(self, key: bytes) -> Iterable[bytes]:
        """The values under a key."""
        return self._database.fetch(self._prefix + key)

    def delete(self, key: bytes, value: bytes) -> None:
        """Forget a value under a key."""
        self._database.delete(self._prefix + key, value)

    def move(self, src: bytes, dest: bytes, value: bytes) -> None:
        """Keep a value under another key."""
        self._database.move(self._prefix + src, self._prefix + dest, value)
