"""``fourfold tour``: verify a right and a wrong kernel, and say what to do next."""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fourfold.cli.pytest_command import part_of, pytest_command
from fourfold.processes.family import die_with, kill_descendants
from fourfold.processes.stop import Stop


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add no options: the tour takes none."""


class Verification:
    """A running verification of one function of the example.

    Args:
        function: its name in docs/examples/softmax.py.
        folder: the folder for the verdict.
    """

    def __init__(self, function: str, folder: Path) -> None:
        self.function, self._verdict = function, folder / f"{function}.json"
        options = ["--dtype", "float32", "--verdict", str(self._verdict), "-q", "-p", "no:cacheprovider", "--tb=no"]
        command = pytest_command("--candidate", f"softmax={example()}:{function}", *options)
        die = functools.partial(die_with, os.getpid())
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=die
        )

    def result(self) -> dict[str, Any]:
        """Wait for the run to end; return its verdict.

        Raises:
            RuntimeError: the run left no verdict. The message has its output.
        """
        printed, _ = self._process.communicate()
        if not self._verdict.is_file():
            raise RuntimeError(f"the run on {self.function} left no verdict:\n{printed}")
        return {**json.loads(self._verdict.read_text()), "table": table_of(printed)}


def example() -> Path:
    """Return the file of the example's kernels."""
    return part_of("docs/examples/softmax.py", "docs/examples/softmax.py")


def table_of(printed: str) -> str:
    """Return the table that closes a run's output."""
    lines = printed.partition(" verified ")[2].splitlines()[1:]
    return "\n".join(line for line in lines if line.startswith(("softmax ", "  candidate")))


def command(args: argparse.Namespace) -> int:
    """Verify both kernels of the example; return 0 if the right one is accepted and the wrong one rejected."""
    with Stop() as stop:
        try:
            return guided_tour()
        except KeyboardInterrupt:
            kill_descendants()
            print("fourfold tour: interrupted", file=sys.stderr)
            return stop.status


def guided_tour() -> int:
    """Print the tour; return its exit code."""
    print(f"Two Triton kernels for softmax, in {example()}, are put through every check in float32.", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Verification(name, Path(folder)) for name in ("softmax", "softmax_without_maximum")}
        right, wrong = (run.result() for run in runs.values())
    failures = [check for check in wrong["checks"] if check["outcome"] == "failed"]
    print(
        f"\n1. softmax: {right['counts']['passed']} checks passed, {right['counts']['failed']} failed.",
        right["table"],
        sep="\n",
    )
    print("   In the cell: worst error in units of its bound, number of examples, seconds.")
    print(f"\n2. softmax_without_maximum: {len(failures)} checks failed.\n{wrong['table']}")
    if failures:
        print(f"   The first failure:\n\n{failures[0]['message']}\n{failures[0]['counterexample']}")
        print(f"\n   The command that repeats it:\n\n{failures[0]['repeat']}")
    as_expected = right["passed"] and failures and not wrong["passed"]
    print(
        "\nNext: fourfold verify my_kernels.py:my_softmax --as softmax\n"
        "      fourfold init my_kernels.py      a test file for your kernels, and a workflow that runs it\n"
        "      fourfold explain forward         what a check claims, or an operation takes"
    )
    return 0 if as_expected else 1
