"""A plugin for every run of pytest. It adds the options of the gate, for benchmarks of kernels, and no others.

It also supports ``pytest --report DIR`` with an existing DIR.

Before pytest knows a plugin's options, it takes their values for tests if a file or a folder of that name exists. If no
test is given, it looks for its configuration there, and misses the user's folder and its configuration: the same
command works once, while DIR does not exist, and never again. pytest understands ``--report=DIR``. So this plugin
restarts a misled run, with each option and its value joined.

See "rootdir" in pytest's documentation, and pytest's issue 1435.
"""

import itertools
import os
import shlex
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fourfold.compat.pytest_benchmark_internals import trim_processor
from fourfold.operations.registry import did_you_mean
from fourfold.pytest_plugin.options import add_gate_options, names

# The options of `fourfold` that take a value.
OPTIONS = tuple(name for name, takes_value in names().items() if takes_value)
CONFIGURATIONS = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
_VARIABLE = "PYTEST_ADDOPTS"


# What to say at the end of a run that was to time, and has nothing to time.
_NOTHING = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the gate."""
    add_gate_options(parser.getgroup("fourfold", "verification of kernels").addoption)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse --perf-gate without a comparison, and register the mark of decisive tests."""
    config.addinivalue_line("markers", "decisive: if it fails, the other checks of the kernel are brief")
    if config.getoption("perf_gate") and not config.getoption("--benchmark-compare", None):
        raise pytest.UsageError("--perf-gate decides after a comparison: it needs --benchmark-compare")


def decisive_first(items: list[pytest.Item]) -> None:
    """Put decisive tests before the others of their class or module, whatever has shuffled them.

    Whether they fail decides whether the others are brief.
    """
    places: dict[object, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(item.parent, []).append(place)
    for slots in places.values():
        queue = sorted((items[place] for place in slots), key=lambda item: item.get_closest_marker("decisive") is None)
        for place, item in zip(slots, queue):
            items[place] = item


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    """Note that --benchmark-only finds no benchmark; order the tests of suites."""
    benchmarks = [item for item in items if "benchmark" in getattr(item, "fixturenames", ())]
    if config.getoption("--benchmark-only", False) and not benchmarks:
        config.stash[_NOTHING] = (
            "--benchmark-only: no collected test is a benchmark."
            " Write TestSpeed = fourfold.benchmark_suite(kernel, operation), or run"
            " fourfold bench FILE.py:KERNEL --as OPERATION"
        )
    result = yield
    decisive_first(items)
    return result


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_benchmark_compare_machine_info(machine_info: dict[str, Any], compared_benchmark: dict[str, Any]) -> None:
    """Let a record of kernels differ only by the machine: a suite brings the plugin that describes it, and compares."""
    former = compared_benchmark["machine_info"]
    if "fourfold" in former and "fourfold" not in machine_info:
        machine_info["fourfold"] = former["fourfold"]
        trim_processor(machine_info)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say that there was nothing to time."""
    if message := config.stash.get(_NOTHING, ""):
        terminalreporter.line(message, yellow=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    """Restart if pytest took an option's value for a path."""
    result = yield
    folder, words = early_config.invocation_params.dir, list(map(str, early_config.invocation_params.args))
    variable = shlex.split(os.environ.get(_VARIABLE, ""))
    values = [folder / value for value in (*misleading(words, folder), *misleading(variable, folder))]
    if "PYTEST_XDIST_WORKER" in os.environ:
        return result
    read, rest = parser.parse_known_and_unknown_args(args)
    if early_config.pluginmanager.hasplugin("fourfold"):
        for option in (word.partition("=")[0] for word in rest if word.startswith("--")):
            if close := did_you_mean(option, names()):
                raise pytest.UsageError(f"no such option: {option}{close}")
    if not values:
        return result
    # If an option is unknown, the run is about to fail; if others know it, it is not ours.
    unknown = any(argument in OPTIONS for argument in rest)
    if unknown or (early_config.pluginmanager.hasplugin("fourfold") and astray(early_config, values, read.file_or_dir)):
        begin_anew(early_config, words, join_options(words, folder), join_options(variable, folder))
    return result


def misleading(arguments: Sequence[str], folder: Path) -> list[str]:
    """Return the values of our options that name an existing file or folder."""
    pairs = itertools.pairwise(arguments)
    return [value for option, value in pairs if option in OPTIONS and (folder / value).exists()]


def join_options(arguments: Sequence[str], folder: Path) -> list[str]:
    """Join each misleading value with its option, as ``--option=value``."""
    result: list[str] = []
    for argument in arguments:
        if result and misleading([result[-1], argument], folder):
            result[-1] += f"={argument}"
        else:
            result.append(argument)
    return result


def astray(config: pytest.Config, values: Sequence[Path], tests: Sequence[str]) -> bool:
    """Return whether pytest found another root folder than it would have without these values.

    Args:
        config: of the run.
        values: the values that pytest took for tests.
        tests: the given tests.
    """
    cwd, root = config.invocation_params.dir, config.rootpath
    paths = (cwd / test.partition("::")[0] for test in tests)
    start = next((path for path in paths if path.exists()), cwd)
    if not start.is_relative_to(root):
        return True
    dirs = [folder for folder in (start, *start.parents) if folder != root and folder.is_relative_to(root)]
    configured = config.inipath is not None and not any((f / name).is_file() for f in dirs for name in CONFIGURATIONS)
    return not configured and any(value.is_relative_to(root) and not value.is_relative_to(start) for value in values)


def begin_anew(config: pytest.Config, words: Sequence[str], better: Sequence[str], variable: Sequence[str]) -> None:
    """Replace the process by one with unambiguous arguments.

    Raises:
        pytest.UsageError: pytest was not started by its own command.
    """
    command = sys.orig_argv
    if command[len(command) - len(words) :] != words:
        options = ", ".join(option for option in OPTIONS if option in words and option not in better)
        raise pytest.UsageError(f"pytest takes the value of {options} for a test: write it behind a =")
    if capture := config.pluginmanager.getplugin("capturemanager"):
        capture.suspend_global_capture(in_=True)
    os.environ[_VARIABLE] = shlex.join(variable)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*command[: len(command) - len(words)], *better])
