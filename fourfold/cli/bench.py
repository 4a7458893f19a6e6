"""``fourfold bench``: time a kernel of the user's by pytest-benchmark, and compare it with a saved run by the gate."""

import argparse
import os
from pathlib import Path

from fourfold.cli.options import DEVICES
from fourfold.cli.parser import STANDARD_OUTPUT, add_json, passing
from fourfold.cli.pytest_command import pytest_command
from fourfold.cli.verify import add_launch, candidate_of
from fourfold.operations.registry import did_you_mean
from fourfold.processes.child import become

SAVED = Path(".benchmarks")
TESTS = ("benchmarks/test_speed.py", "tests/benchmarks/test_speed.py")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; those that are not known here go to pytest."""
    add = parser.add_argument
    add("kernel", metavar="FILE_OR_MODULE:FUNCTION", help="the implementation, as my_kernels.py:my_softmax")
    add("--as", dest="operation", metavar="OPERATION", help="what it computes, as softmax or FILE.py:OPERATION")
    add("--save", metavar="NAME", help=f"save the times and the sources in {SAVED}")
    add(
        "--compare",
        metavar="NAME",
        help="compare with the last run of this name, measure again in turns what seems to have changed, and exit"
        " with 1 if it is slower",
    )
    parser.set_defaults(passed=[])
    add_passed = passing(add)
    add_passed("--device", choices=DEVICES, help="auto: a GPU if there is one")
    add_passed("--dtype", metavar="NAME", help="only this dtype (repeatable); else float32, and on a GPU bfloat16 too")
    add_passed(
        "--sizes",
        metavar="AXIS=SIZE,...",
        help="of a declared operation, as rows=4096,cols=1024, in place of its workloads (repeatable)",
    )
    add_passed("-k", metavar="EXPRESSION", help="only the workloads whose names match, as 'small and forward'")
    add_passed("-q", "--quiet", action="store_true", help="print less")
    add_json(parser, "the times")
    add_launch(parser)


def command(args: argparse.Namespace) -> int:
    """Run the benchmarks; the exit code is pytest's."""
    words = [*args.passed, "--benchmark-only", f"--candidate={candidate_of(args)}"]
    words += [f"--benchmark-save={args.save}"] if args.save else []
    words += [f"--benchmark-compare={last_record(args)}", "--perf-gate"] if args.compare else []
    if args.json == STANDARD_OUTPUT:  # all else that pytest prints goes to standard error
        output = os.dup(1)
        os.set_inheritable(output, True)
        os.dup2(2, 1)
        args.json = f"/dev/fd/{output}"
    words += [f"--timings={args.json}"] if args.json else []
    become(pytest_command(*words, tests=TESTS))


def last_record(args: argparse.Namespace) -> Path:
    """Return the record of the last saved run of a name."""
    runs = {path.stem.partition("_")[2]: path for path in sorted(SAVED.glob("*/[0-9]*_*.json"), key=lambda p: p.name)}
    if args.compare not in runs:
        hint = f"there are {', '.join(runs)}{did_you_mean(args.compare, runs)}" if runs else "save one by --save"
        args.error(f"--compare: no run is saved as {args.compare} in {SAVED.absolute()}: {hint}")
    return runs[args.compare]
