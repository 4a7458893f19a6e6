"""Results that take long and that many tests read: one worker computes each, and the others read it from disk."""

import functools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import filelock

Result = TypeVar("Result")
_folders: list[Path] = []


def keep_results_in(folder: Path) -> None:
    """Name the folder that the workers of this run share, and no other run."""
    _folders[:] = [folder]


def one_run(make: Callable[[], Result]) -> Callable[[], Result]:
    """Return a function that returns `make()`, which is called once for all workers.

    Args:
        make: returns what pickle can write, the same in each worker. A worker in which it raises keeps nothing.
    """

    @functools.cache
    def result() -> Result:
        (folder,) = _folders
        file = folder / f"{make.__module__}.{make.__qualname__}.pickle"
        with filelock.FileLock(f"{file}.lock"):
            if not file.is_file():
                made = pickle.dumps(make())
                # The lock of a worker that dies while it writes goes to the next one.
                part = file.with_suffix(f".{os.getpid()}")
                part.write_bytes(made)
                part.replace(file)
            return pickle.loads(file.read_bytes())

    return result
