"""Slow results that many tests read: one worker computes each, and the others read it from disk."""

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import filelock

from fourfold.processes.files import write_atomically

Arguments, Result = ParamSpec("Arguments"), TypeVar("Result")
_folders: list[Path] = []


def keep_results_in(folder: Path) -> None:
    """Set the folder that the workers of this run share with no other run."""
    _folders[:] = [folder]


def one_run(make: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function that calls `make` once for all workers with the same arguments, and returns its result.

    Args:
        make: returns a result that pickle can write, the same in each worker. If it raises, nothing is kept. Its
            arguments are names and numbers.
    """

    @functools.cache
    def result(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        (folder,) = _folders
        words = [make.__module__, make.__qualname__, *map(str, arguments), *(f"{k}={v}" for k, v in named.items())]
        file = folder / f"{'.'.join(words)}.pickle"
        with filelock.FileLock(f"{file}.lock"):
            if not file.is_file():
                write_atomically(file, pickle.dumps(make(*arguments, **named)))
            return pickle.loads(file.read_bytes())

    return result
