"""Hypothesis's database of failures, with a separate key for each search."""

from collections.abc import Iterable

from hypothesis.database import ExampleDatabase


class Filed(ExampleDatabase):
    """A database that shows a search only the entries of the same search.

    Hypothesis stores a failure under the source text of its test function. All searches run the same function and
    would share one key. Each would then delete the failures of the others, because it passes on them.

    Args:
        database: the database that stores all entries.
        name: the name of the search.
    """

    def __init__(self, database: ExampleDatabase, name: str) -> None:
        super().__init__()
        self._database, self._prefix = database, name.encode() + b": "

    def save(self, key: bytes, value: bytes) -> None:
        """Save a value under a key."""
        self._database.save(self._prefix + key, value)

    def fetch(self, key: bytes) -> Iterable[bytes]:
        """Return the values under a key."""
        return self._database.fetch(self._prefix + key)

    def delete(self, key: bytes, value: bytes) -> None:
        """Delete a value under a key."""
        self._database.delete(self._prefix + key, value)

    def move(self, src: bytes, dest: bytes, value: bytes) -> None:
        """Move a value from one key to another."""
        self._database.move(self._prefix + src, self._prefix + dest, value)
