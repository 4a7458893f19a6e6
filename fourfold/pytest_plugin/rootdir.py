"""``pytest --report DIR`` where DIR is there already: a plugin for every run of pytest, that adds no option to any.

Before pytest knows a plugin's options it takes their values for tests, if there is a file or a folder of that name.
Where none is given besides, it looks for its configuration there, and neither finds the folder that the user is in nor
what is configured in it: the same command works once, when DIR is not there yet, and never again. ``--report=DIR`` is
not misunderstood. So a run that this has led astray begins anew, with each option and its value in one.

See "rootdir" in pytest's documentation, and pytest's issue 1435.
"""

import itertools
import os
import shlex
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

# Those of `fourfold` that take a value.
OPTIONS = (
    *("--op", "--backend", "--dtype", "--device", "--examples", "--candidate", "--claims"),
    *("--verdict", "--reproduce", "--report", "--call-seconds", "--compile-seconds"),
    *("--perf-gate-seconds", "--perf-gate-slowdowns"),
)
CONFIGURATIONS = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
_VARIABLE = "PYTEST_ADDOPTS"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    """Begin anew where the value of an option has led pytest astray."""
    result = yield
    here, given = early_config.invocation_params.dir, list(map(str, early_config.invocation_params.args))
    variable = shlex.split(os.environ.get(_VARIABLE, ""))
    values = [here / value for value in (*misleading(given, here), *misleading(variable, here))]
    if not values or "PYTEST_XDIST_WORKER" in os.environ:
        return result
    read, rest = parser.parse_known_and_unknown_args(args)
    # Where nobody knows an option, the run is about to fail; where others do, it is none of ours.
    unknown = any(argument in OPTIONS for argument in rest)
    if unknown or (early_config.pluginmanager.hasplugin("fourfold") and astray(early_config, values, read.file_or_dir)):
        begin_anew(early_config, given, joined(given, here), joined(variable, here))
    return result


def misleading(arguments: Sequence[str], folder: Path) -> list[str]:
    """The values of those options that are names of something in a folder."""
    pairs = itertools.pairwise(arguments)
    return [value for option, value in pairs if option in OPTIONS and (folder / value).exists()]


def joined(arguments: Sequence[str], folder: Path) -> list[str]:
    """The arguments, with each misleading value in one with its option."""
    found: list[str] = []
    for argument in arguments:
        if found and misleading([found[-1], argument], folder):
            found[-1] += f"={argument}"
        else:
            found.append(argument)
    return found


def astray(config: pytest.Config, values: Sequence[Path], tests: Sequence[str]) -> bool:
    """Whether pytest has another folder for its root than it had without these values.

    Args:
        config: of the run.
        values: which pytest has taken for tests.
        tests: that are given.
    """
    here, root = config.invocation_params.dir, config.rootpath
    given = (here / test.partition("::")[0] for test in tests)
    start = next((path for path in given if path.exists()), here)
    if not start.is_relative_to(root):
        return True
    below = [folder for folder in (start, *start.parents) if folder != root and folder.is_relative_to(root)]
    configured = config.inipath is not None and not any((f / name).is_file() for f in below for name in CONFIGURATIONS)
    return not configured and any(value.is_relative_to(root) and not value.is_relative_to(start) for value in values)


def begin_anew(config: pytest.Config, given: Sequence[str], better: Sequence[str], variable: Sequence[str]) -> None:
    """Replace the process by one with better arguments.

    Raises:
        pytest.UsageError: pytest was not started by a command of its own.
    """
    command = sys.orig_argv
    if command[len(command) - len(given) :] != given:
        options = ", ".join(option for option in OPTIONS if option in given and option not in better)
        raise pytest.UsageError(f"pytest takes the value of {options} for a test: write it behind a =")
    if capture := config.pluginmanager.getplugin("capturemanager"):
        capture.suspend_global_capture(in_=True)
    os.environ[_VARIABLE] = shlex.join(variable)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*command[: len(command) - len(given)], *better])
