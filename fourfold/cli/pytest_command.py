"""The command that runs the checks of the operations by pytest, in the user's project."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

import fourfold
from fourfold.processes.child import end_with
from fourfold.pytest_plugin.rootdir import CONFIGURATIONS

# Files that configure other tools as well, and the heading of pytest's part.
_SHARED = {"tox.ini": "[pytest]", "setup.cfg": "[tool:pytest]"}
# Warnings of torch and Triton fail no check, whatever the project's own filters say.
_WARNINGS = ("-Wdefault", *(f"-Wignore::{name}Warning" for name in ("Deprecation", "Future", "Resource")))


def part_of(installed: str, in_clone: str) -> Path:
    """Return the path of a part of this package: in a wheel the first, as "claims", in a clone "tests/operations"."""
    for path in (Path(fourfold.__file__).parent / installed, Path(fourfold.__file__).parents[1] / in_clone):
        if path.exists():
            return path
    raise FileNotFoundError(f"neither fourfold/{installed} nor {in_clone} is there: the installation is incomplete")


def pytest_command(*arguments: str, tests: tuple[str, str] = ("claims", "tests/operations")) -> list[str]:
    """Return the command that runs the checks with the plugin, or other tests of this package, from any folder.

    pytest would look for its configuration above the checks, which lie in this package.
    """
    folder = Path.cwd()
    configuration = configuration_of(folder)
    project = ["-c", str(configuration)] if configuration else [f"--rootdir={folder}"]
    # No assertion of the harness is worth the seconds that rewriting it takes.
    options = ["-p", "fourfold", "--assert=plain", *_WARNINGS]
    return [sys.executable, "-m", "pytest", str(part_of(*tests)), *options, *project, *arguments]


def run_here(command: Sequence[str]) -> NoReturn:
    """Run a command of `pytest_command` in this process, and end the process with its exit code.

    A process of its own would start Python and import pytest once more.
    """
    sys.orig_argv, sys.argv = [*command], [*command[2:]]  # without the interpreter and its option -m
    if not sys.flags.safe_path and sys.path[:1] != [os.getcwd()]:  # as `python -m` does
        sys.path.insert(0, os.getcwd())
    end_with(pytest.console_main)


def configuration_of(folder: Path) -> Path | None:
    """Return the file that configures pytest for a folder, or None."""
    for path in (parent / name for parent in (folder, *folder.parents) for name in CONFIGURATIONS):
        if path.is_file() and _SHARED.get(path.name, "") in path.read_text(encoding="utf-8", errors="replace"):
            return path
    return None
