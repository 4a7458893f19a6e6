"""What has to begin before torch is imported: variables of libraries, and the process that runs untrusted candidates.

That process imports torch, too. It does so while this process does, if the command line promises that it is needed. A
wrong guess costs time alone: a run without untrusted candidates ends the process, and a run that lacks it starts it.

Modules and collected tests live until the end of the run. So the garbage collector rests while they are made, and does
not look at them afterwards: a seventh of the time to start and collect. When Python ends, Triton's library from 3.9 on,
which nanobind made, reports all of its objects that are not collected, so there the collector looks at them once more.
"""

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from fourfold.candidates.process.first_process import first_process
from fourfold.pytest_plugin.options import add_options

# Set before NumPy and torch are imported: tensors are small, and on a busy machine threads that wait for one another
# are slower than one thread. The child processes of a test have them, too.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# What NVIDIA's driver shows of itself.
DRIVER = Path("/proc/driver/nvidia/version")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Stop the garbage collector and start the process of candidates, when pytest registers this plugin."""
    config = pluginmanager.get_plugin("pytestconfig")
    if config is None:
        return
    config.add_cleanup(unfreeze)
    if gc.isenabled():
        gc.disable()
        config.add_cleanup(gc.enable)  # for a run that ends before it collects
    if needs_process(list(map(str, config.invocation_params.args))):
        first_process()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Start the garbage collector when the tests are collected, and leave out all that exists by then."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def unfreeze() -> None:
    """Let the garbage collector look at all objects when Python ends, if Triton's library reports what it leaves."""
    library = sys.modules.get("triton._C.libtriton")
    if library is not None and type(library.ir.builder).__module__ == "nanobind":
        gc.unfreeze()


def needs_process(arguments: Sequence[str]) -> bool:
    """Return whether pytest, with these arguments, is going to run candidates in a process of their own on the CPU."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_options(parser.add_argument)
    options = argparse.Namespace(candidate=[], untrusted=False, untrusted_where_possible=False)
    with contextlib.suppress(argparse.ArgumentError, SystemExit):  # the run itself reports the mistake
        options, _ = parser.parse_known_args(arguments)
    if not options.candidate or not (options.untrusted or options.untrusted_where_possible):
        return False
    on_cpu = options.device == "cpu" or (options.device == "auto" and not DRIVER.exists())
    return on_cpu and not any(map(declares_its_operation, options.candidate))


def declares_its_operation(candidate: str) -> bool:
    """Return whether a candidate's own file declares its operation: then the judge imports it."""
    operation, _, kernel = candidate.partition("=")
    return ":" in operation and operation.rpartition(":")[0] == kernel.rpartition(":")[0]
