"""The command ``fourfold``: a thin skin over pytest and the modules of this package."""

import argparse
import functools
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fourfold
from fourfold.processes.child import become
from fourfold.processes.family import die_with, kill_descendants
from fourfold.processes.stop import Stop
from fourfold.sanitize import command as sanitize

# A kernel of a .cu file, with or without its launch.
LAUNCHED = re.compile(r"\.cuh?:")
ACCEPT = "--accept-claims"
DESCRIPTION = {
    "tour": "verify two kernels that come with this package, a right one and a wrong one, and say what to do next",
    "verify": "put a kernel of yours through every check of a known operation",
    "grade": "judge thousands of kernels, none of them trusted, on one machine or on many",
    "accuracy": "measure the rounding errors of kernels beside those of torch and of other libraries",
    "resources": "compile kernels without a GPU, and compare what they need with another revision",
    "sanitize": "run a script with Triton kernels on the CPU, and report memory errors and races",
    "mutate": "make small mistakes in kernels, one at a time, and see whether the checks reject each",
}
USAGE = "fourfold {tour,verify,grade,accuracy,resources,sanitize,mutate} ...\n\n" + "\n".join(
    f"  {name:9} {what}" for name, what in DESCRIPTION.items()
)


def operation_tests() -> Path:
    """Return the folder with the pytest checks: tests/operations in a clone, fourfold/claims in a wheel."""
    for folder in (
        Path(fourfold.__file__).parent / "claims",
        Path(fourfold.__file__).parents[1] / "tests" / "operations",
    ):
        if folder.is_dir():
            return folder
    raise FileNotFoundError("neither fourfold/claims nor tests/operations is there: the installation is incomplete")


def pytest_command(*arguments: str) -> list[str]:
    """Return the command that runs the checks with the plugin, from any folder."""
    return [sys.executable, "-m", "pytest", str(operation_tests()), "-p", "fourfold", *arguments]


def verify(arguments: Sequence[str]) -> int:
    """Run ``fourfold verify FILE:FUNCTION --as OPERATION [PYTEST OPTION ...]``; return pytest's exit code."""
    command = command_of_verify(arguments)
    return accept_claims(command) if ACCEPT in arguments else become(command)


def accept_claims(command: list[str]) -> int:
    """Run a pytest command until it passes or suggests no further claim, each time with the suggested claims."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--verdict", type=Path)
    with tempfile.TemporaryDirectory() as folder, Stop() as stop:
        given, _ = options.parse_known_args(command)
        path = given.verdict or Path(folder) / "verdict.json"
        die, claims = functools.partial(die_with, os.getpid()), None
        while True:
            try:
                code = subprocess.run([*command, "--verdict", str(path)], preexec_fn=die, check=False).returncode
            except KeyboardInterrupt:
                kill_descendants()
                return stop.status
            suggested = json.loads(path.read_text())["suggested_claim"] if path.is_file() else ""
            if code != 1 or suggested in ("", claims):  # 1: some tests failed
                return code
            claims = suggested
            command += ["--claims", claims]
            print(f"\nfourfold verify: once more, with --claims {shlex.quote(claims)}\n", flush=True)


def command_of_verify(arguments: Sequence[str]) -> list[str]:
    """Return the pytest command for the arguments of ``fourfold verify``."""
    parser = argparse.ArgumentParser(prog="fourfold verify", description=DESCRIPTION["verify"])
    parser.add_argument(
        "kernel",
        metavar="FILE_OR_MODULE:FUNCTION",
        help="the implementation, as my_kernels.py:my_softmax or softmax.cu:softmax_kernel",
    )
    parser.add_argument(
        "--as", dest="operation", required=True, metavar="OPERATION", help="what it computes, as softmax"
    )
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="run the kernel in the process that judges it, which is always so on a GPU",
    )
    parser.add_argument(
        ACCEPT,
        action="store_true",
        help="verify a kernel that fails once more, within the claims for which it is right, if there are any",
    )
    of_cuda = parser.add_argument_group("a kernel of a .cu file", "expressions over sizes, as rows or ceil(n / 256)")
    of_cuda.add_argument("--grid", metavar="BLOCKS", help="the number of blocks, or up to three")
    of_cuda.add_argument("--block", metavar="THREADS", help="the threads of a block, or up to three numbers")
    of_cuda.add_argument("--shared", metavar="BYTES", help="dynamic shared memory: 0 unless told")
    of_cuda.add_argument("--args", metavar="A, B, ...", help="the kernel's arguments, as x, out, rows, cols")
    given, options = parser.parse_known_args(arguments)
    kernel = given.kernel
    if LAUNCHED.search(kernel):
        kernel = launched(parser, given)
        options.append("--forward-only")  # such a kernel has no gradient
    elif given.grid or given.block or given.shared or given.args:
        parser.error(f"--grid, --block, --shared and --args are for a kernel of a .cu file, and {kernel} is none")
    if not given.trusted:
        options.append("--untrusted-where-possible")
    return pytest_command("--candidate", f"{given.operation}={kernel}", *options)


def launched(parser: argparse.ArgumentParser, given: argparse.Namespace) -> str:
    """Return the kernel of a .cu file with its launch: ``FILE.cu:KERNEL<<<GRID, BLOCK, SHARED>>>(ARGUMENTS)``."""
    if "<<<" in given.kernel:
        return given.kernel
    if not (given.grid and given.block):
        parser.error(f"{given.kernel} needs --grid and --block, as --grid rows --block 256")
    shared = f", {given.shared}" if given.shared else ""
    sizes = (f"({size})" if "," in size and not size.startswith("(") else size for size in (given.grid, given.block))
    arguments = f"({given.args})" if given.args else ""
    return f"{given.kernel}<<<{', '.join(sizes)}{shared}>>>{arguments}"


def mutate(arguments: Sequence[str]) -> int:
    """Run ``fourfold mutate ...``: see `fourfold.mutation`."""
    return become([sys.executable, "-m", "fourfold.mutation", *arguments])


def grade(arguments: Sequence[str]) -> int:
    """Run ``fourfold grade ...``: see `fourfold.cli.grade`."""
    return importlib.import_module("fourfold.cli.grade").command(arguments)


def accuracy(arguments: Sequence[str]) -> int:
    """Run ``fourfold accuracy ...``: see `fourfold.performance.accuracy`."""
    return importlib.import_module("fourfold.cli.accuracy").command(arguments)


def resources(arguments: Sequence[str]) -> int:
    """Run ``fourfold resources ...``: see `fourfold.performance.resources`."""
    return importlib.import_module("fourfold.performance.resources").command(arguments)


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
    inside, beside = (Path(fourfold.__file__).parents[n] for n in (0, 1))
    return next(
        path for path in (inside / "examples" / "softmax.py", beside / "docs/examples/softmax.py") if path.is_file()
    )


def table_of(printed: str) -> str:
    """Return the table that closes a run's output."""
    lines = printed.partition(" verified ")[2].splitlines()[1:]
    return "\n".join(line for line in lines if line.startswith(("softmax ", "  candidate")))


def tour() -> int:
    """Verify both kernels of the example; return 0 if the right one is accepted and the wrong one rejected."""
    with Stop() as stop:
        try:
            return guided()
        except KeyboardInterrupt:
            kill_descendants()
            print("fourfold tour: interrupted", file=sys.stderr)
            return stop.status


def guided() -> int:
    """Print the tour; return its exit code."""
    print(f"Two Triton kernels for softmax, in {example()}, are put through every check in float32.", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Verification(name, Path(folder)) for name in ("softmax", "softmax_without_maximum")}
        right, wrong = (run.result() for run in runs.values())
    failed = [check for check in wrong["checks"] if check["outcome"] == "failed"]
    print(
        f"\n1. softmax: {right['counts']['passed']} checks passed, {right['counts']['failed']} failed.",
        right["table"],
        sep="\n",
    )
    print("   In the cell: worst error in units of its bound, number of examples, seconds.")
    print(f"\n2. softmax_without_maximum: {len(failed)} checks failed.\n{wrong['table']}")
    if failed:
        print(f"   The first failure:\n\n{failed[0]['message']}\n{failed[0]['counterexample']}")
        print(f"\n   The command that repeats it:\n\n{failed[0]['repeat']}")
    as_expected = right["passed"] and failed and not wrong["passed"]
    print(
        "\nNext: fourfold verify my_kernels.py:my_softmax --as softmax\n"
        "      pytest -n auto             all tests of this repository\n"
        "      docs/README.md             what is checked, how bounds are made, how to add an operation"
    )
    return 0 if as_expected else 1


def main() -> int:
    """Run the command line; return the exit code."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command == "tour" and not arguments:
        return tour()
    commands = {
        "verify": verify,
        "grade": grade,
        "accuracy": accuracy,
        "resources": resources,
        "sanitize": sanitize.command,
        "mutate": mutate,
    }
    if command in commands:
        return commands[command](arguments)
    print(USAGE)
    return 0 if command in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
