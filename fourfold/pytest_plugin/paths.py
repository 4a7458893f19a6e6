"""Where a run writes what it is asked for: found out before it begins, so that its end does not fail by it."""

import tempfile
from pathlib import Path

import pytest


def file_to_write(option: str, path: Path, folder: Path) -> Path:
    """The file that an option names, from the folder that the user is in; the folders above it are made.

    Raises:
        pytest.UsageError: it is no file, or cannot be written.
    """
    whole = folder / path
    if whole.exists() and not whole.is_file():
        raise pytest.UsageError(f"{option} {path}: {'a folder' if whole.is_dir() else 'no plain file'} has this name")
    _try(option, path, whole.parent)
    return whole


def folder_to_write(option: str, path: Path, folder: Path) -> Path:
    """The folder that an option names, from the folder that the user is in; those above it are made, it itself is not.

    A folder that came into being before workers start would pass there for one of tests.

    Raises:
        pytest.UsageError: it is no folder, or nothing can be written into it.
    """
    whole = folder / path
    if whole.exists() and not whole.is_dir():
        raise pytest.UsageError(f"{option} {path}: a file has this name, and a folder is wanted")
    _try(option, path, whole if whole.is_dir() else whole.parent)
    return whole


def _try(option: str, path: Path, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise pytest.UsageError(f"{option} {path}: {folder} takes no files: {error.strerror}") from error
