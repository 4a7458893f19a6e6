"""The files and folders that a run writes, checked before it begins, so that it does not fail at its end."""

import tempfile
from pathlib import Path

import pytest


def file_to_write(option: str, path: Path, folder: Path) -> Path:
    """Return the file that an option names, relative to the user's folder; create its parent folders.

    Raises:
        pytest.UsageError: the path is no file, or cannot be written.
    """
    target = folder / path
    if target.exists() and not target.is_file():
        raise pytest.UsageError(f"{option} {path}: {'a folder' if target.is_dir() else 'no plain file'} has this name")
    _try(option, path, target.parent)
    return target


def folder_to_write(option: str, path: Path, folder: Path) -> Path:
    """Return the folder that an option names, relative to the user's folder; create only its parents.

    Workers would take a folder that exists before they start for a folder of tests.

    Raises:
        pytest.UsageError: the path is no folder, or nothing can be written into it.
    """
    target = folder / path
    if target.exists() and not target.is_dir():
        raise pytest.UsageError(f"{option} {path}: a file has this name, and a folder is wanted")
    _try(option, path, target if target.is_dir() else target.parent)
    return target


def _try(option: str, path: Path, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise pytest.UsageError(f"{option} {path}: {folder} takes no files: {error.strerror}") from error
