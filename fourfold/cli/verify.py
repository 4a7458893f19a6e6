"""``fourfold verify``: run the checks on a kernel of the user's by pytest, with its options."""

import argparse
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fourfold.cli.parser import add_json, passing
from fourfold.cli.pytest_command import pytest_command, run_here
from fourfold.cli.settings import ProjectSettings
from fourfold.cli.source import NotThere, definition_of, require_function, require_operation
from fourfold.engine import annotations
from fourfold.processes.family import die_with, kill_descendants
from fourfold.processes.stop import Stop
from fourfold.pytest_plugin.options import add_options as add_options_of_plugin

# A kernel of a .cu file, with or without its launch.
LAUNCHED = re.compile(r"\.cuh?:")
# The options after which a run still has every check of every dtype.
_WHOLE_RUN = {
    *("--call-seconds", "--claims", "--device", "--forbid-fallback", "--forward-only", "--no-refusals"),
    *("--quiet", "--report", "--strict-errors", "--verbose", "--verdict", "-q", "-v"),
}
_MOST_WORKERS = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options: those of this command, and those that pytest reads."""
    add = parser.add_argument
    add(
        "kernel",
        nargs="?",
        metavar="FILE_OR_MODULE:FUNCTION",
        help="the implementation, as my_kernels.py:my_softmax or softmax.cu:softmax_kernel; without one, each kernel"
        " that [tool.fourfold.kernels] of pyproject.toml names",
    )
    add("--as", dest="operation", metavar="OPERATION", help="what it computes, as softmax or FILE.py:OPERATION")
    add("--trusted", action="store_true", help="run the kernel in the process that judges it, as always on a GPU")
    add(
        "--accept-claims",
        action="store_true",
        help="verify a kernel that fails once more, within the claims for which it is right, if there are any",
    )
    add_json(parser, "the verdict")
    add_launch(parser)
    parser.set_defaults(passed=[])
    add_options_of_plugin(passing(parser.add_argument_group("checks").add_argument))
    add_passed = passing(parser.add_argument_group("pytest", "these, and all others: see pytest --help").add_argument)
    add_passed("-k", metavar="EXPRESSION", help="only the checks whose names match, as forward or 'memory and float32'")
    add_passed("-x", action="store_true", help="stop at the first failure")
    add_passed("-q", "--quiet", action="store_true", help="print less")
    add_passed("-v", "--verbose", action="store_true", help="print the name of each check")
    add_passed(
        "-n",
        metavar="WORKERS",
        help="the number of processes at a time, or auto; 0 runs all in one process. Without -n, a"
        " run of all checks and dtypes on the CPU has one per core, up to 4",
    )
    add_passed("--lf", action="store_true", help="only the checks that failed in the last run")
    add_passed("--timeout", metavar="SECONDS", help="limit of each check")
    add_passed("--hypothesis-profile", metavar="NAME", help="default, full or nightly: more cases, and random ones")


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Add the options that launch a kernel of a .cu file."""
    of_cuda = parser.add_argument_group("a kernel of a .cu file", "expressions over sizes, as rows or ceil(n / 256)")
    of_cuda.add_argument("--grid", metavar="BLOCKS", help="the number of blocks, or up to three")
    of_cuda.add_argument("--block", metavar="THREADS", help="the threads of a block, or up to three numbers")
    of_cuda.add_argument("--shared", metavar="BYTES", help="dynamic shared memory: 0 by default")
    of_cuda.add_argument("--args", metavar="A, B, ...", help="the kernel's arguments, as x, out, rows, cols")


def command(args: argparse.Namespace) -> int:
    """Verify a kernel, or each kernel of the settings; return pytest's exit code, or the highest."""
    kernels = ProjectSettings.of(Path.cwd()).kernels
    if not args.kernel and not kernels:
        args.error("FILE_OR_MODULE:FUNCTION is missing, and pyproject.toml has no [tool.fourfold.kernels]")
    if not args.kernel and (args.json or "--verdict" in " ".join(args.passed)):
        args.error("--json and --verdict hold the verdict on one kernel: name it")
    runs = []
    for kernel in [args.kernel] if args.kernel else kernels:
        settings, copy = kernels.get(kernel, {}), argparse.Namespace(**vars(args))
        copy.kernel, copy.operation, copy.passed = kernel, args.operation or settings.get("as"), [*args.passed]
        if "claims" in settings and "--claims" not in " ".join(args.passed):
            copy.passed.append(f"--claims={settings['claims']}")
        runs.append((command_of(copy), copy))
    if len(runs) == 1 and not (args.accept_claims or args.json or annotations.in_github_actions()):
        run_here(runs[0][0])
    with Stop() as stop:
        try:
            return max(run(words, copy) for words, copy in runs)
        except KeyboardInterrupt:
            kill_descendants()
            return stop.status


def run(words: list[str], args: argparse.Namespace) -> int:
    """Run pytest, with --accept-claims until it passes or suggests no further claim; return its exit code."""
    verdicts = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    verdicts.add_argument("--verdict", type=Path)
    with tempfile.TemporaryDirectory() as folder:
        paths, _ = verdicts.parse_known_args(words)
        path = paths.verdict or Path(folder) / "verdict.json"
        words, claims = [*words, f"--verdict={path}"], None
        while True:
            # What pytest prints goes where this command's own words go: to standard error if JSON goes to output.
            output, die = sys.stdout.fileno(), functools.partial(die_with, os.getpid())
            code = subprocess.run(words, stdout=output, preexec_fn=die, check=False).returncode
            claim = json.loads(path.read_text())["suggested_claim"] if path.is_file() else ""
            if not args.accept_claims or code != 1 or claim in ("", claims):  # 1: some tests failed
                break
            claims = claim
            words += ["--claims", claims]
            print(f"\nfourfold verify: once more, with --claims {shlex.quote(claims)}\n", flush=True)
        text = path.read_text() if path.is_file() else ""
        if args.json and text:
            args.json.write_text(text)
        if annotations.in_github_actions() and text:
            print(
                *annotations.check_annotations(json.loads(text)["checks"], *definition_of(args.kernel)),
                sep="\n",
                flush=True,
            )
        return code


def command_of(args: argparse.Namespace) -> list[str]:
    """Return the pytest command for the options of ``fourfold verify``."""
    candidate, options = candidate_of(args), list(args.passed)
    if LAUNCHED.search(args.kernel):
        options.append("--forward-only")  # such a kernel has no gradient
    if not args.trusted:
        options.append("--untrusted-where-possible")
    options += worker_options(args.passed)
    return pytest_command("--candidate", candidate, *options)


def worker_options(words: Sequence[str]) -> list[str]:
    """Return the option for a worker per core, if a run of the passed options is long enough to gain by it; else none.

    Each worker imports torch, which costs more than a run of few checks gains. On a GPU, its memory sets the number.
    """
    selectors = {option.partition("=")[0] for option in words} - _WHOLE_RUN
    on_cpu = "--device=cuda" not in words and ("--device=cpu" in words or not Path("/dev/nvidiactl").exists())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [f"-n{min(cores, _MOST_WORKERS)}"] if cores > 1 and on_cpu and not selectors else []


def candidate_of(args: argparse.Namespace) -> str:
    """Return the value of --candidate for a kernel and its operation: ``OPERATION=FILE_OR_MODULE:FUNCTION``."""
    try:
        require_function(args.kernel)
        require_operation(args.operation)
    except NotThere as error:
        args.error(str(error))
    if LAUNCHED.search(args.kernel):
        return f"{args.operation}={launch_expression(args)}"
    if args.grid or args.block or args.shared or args.args:
        args.error(f"--grid, --block, --shared and --args are for a kernel of a .cu file, and {args.kernel} is none")
    return f"{args.operation}={args.kernel}"


def launch_expression(args: argparse.Namespace) -> str:
    """Return the kernel of a .cu file with its launch: ``FILE.cu:KERNEL<<<GRID, BLOCK, SHARED>>>(ARGUMENTS)``."""
    if "<<<" in args.kernel:
        return args.kernel
    if not (args.grid and args.block):
        args.error(f"{args.kernel} needs --grid and --block, as --grid rows --block 256")
    shared = f", {args.shared}" if args.shared else ""
    sizes = (f"({size})" if "," in size and not size.startswith("(") else size for size in (args.grid, args.block))
    arguments = f"({args.args})" if args.args else ""
    return f"{args.kernel}<<<{', '.join(sizes)}{shared}>>>{arguments}"
