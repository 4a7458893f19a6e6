"""The options of the commands whose work is done by heavy modules, which are imported when a command runs."""

import argparse
import os
from pathlib import Path

from fourfold.cli.parser import add_json
from fourfold.operations.limits import EXAMPLES

DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("triton", "cuda")
ARCHITECTURES = ("80", "90", "100")


def add_cells(parser: argparse.ArgumentParser) -> None:
    """Add the options that select operations, backends and dtypes."""
    add = parser.add_argument
    add("--op", action="append", default=[], metavar="NAME", help="only this operation; repeatable")
    add("--backend", action="append", default=[], choices=KERNELS, help="only this backend; repeatable")
    add("--dtype", action="append", default=[], metavar="NAME", help="only this dtype; repeatable")


def add_kernel(parser: argparse.ArgumentParser) -> None:
    """Add a kernel of the user's and its operation, in place of the library's kernels."""
    parser.add_argument("kernel", nargs="?", metavar="FILE_OR_MODULE:FUNCTION", help="a kernel of yours; needs --as")
    parser.add_argument(
        "--as", dest="operation", metavar="OPERATION", help="what it computes, as softmax or FILE.py:OPERATION"
    )


def add_accuracy(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fourfold accuracy``."""
    add = parser.add_argument
    add_kernel(parser)
    add_cells(parser)
    add("--device", choices=DEVICES, default="auto", help="auto takes a GPU if there is")
    add(
        "--candidate",
        action="append",
        default=[],
        metavar="OP=FILE_OR_MODULE:FUNCTION",
        help="measure this implementation instead of the library's; it runs in this process",
    )
    add(
        "--examples",
        type=int,
        default=EXAMPLES,
        metavar="N",
        help=f"generated cases of each operation and dtype, beside the named ones: {EXAMPLES} by default",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the generated cases: 0 by default")
    add_json(parser, "the figures")


def add_resources(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fourfold resources``."""
    add = parser.add_argument
    add_cells(parser)
    add("--arch", choices=ARCHITECTURES, default="90", help="compute capability times 10: 90 by default")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--base",
        metavar="REVISION",
        help="compare with the kernels of this git revision; operations whose files are the same are left out",
    )
    group.add_argument("--against", type=Path, metavar="FILE", help="compare with a file of --json")
    add_json(parser, "what the kernels need")
    add("--strict", action="store_true", help="exit with 1 if a kernel needs more than before")
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="the number of kernels that compile at once")


def add_grade(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fourfold grade``."""
    add = parser.add_argument
    add("candidates", type=Path, metavar="CANDIDATES.jsonl", help="a line of JSON for each candidate")
    add("--out", type=Path, metavar="FILE", help="append each result, and resume after the last one")
    add("--report", type=Path, metavar="DIR", help="write a page that filters by verdict")
    add("--id", action="append", default=[], metavar="ID", help="judge this candidate alone")
    add("--workers", type=int, metavar="N", help="the number of workers; one for each processor by default")
    add("--gpus", type=int, default=0, choices=(0, 1), help="1 for kernels that run on a GPU")
    add("--ray", metavar="ADDRESS", help="let the machines of a Ray cluster judge, as at auto")
    add("--seed", type=int, metavar="N", help="of the generated cases")
    add("--examples", type=int, default=EXAMPLES, metavar="N", help=f"cases a check; {EXAMPLES} if absent")
    add("--dtype", action="append", default=[], metavar="NAME", help="check only this dtype")
    add("--all-failures", action="store_true", help="continue after a failure")
    add("--no-refusals", action="store_true", help="an exception that a candidate raises is a failure")
    add("--strict-errors", action="store_true", help="bad input must raise the declared errors")
    add("--forbid-fallback", action="store_true", help="torch may allocate memory, but not compute")
    add("--forbid-imports", default="", metavar="A,B", help="reject sources that import these modules")
    add("--speed", action="store_true", help="time right candidates beside the reference; needs --gpus 1")


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fourfold report``."""
    add = parser.add_argument
    add(
        "results",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="what verify --json, grade --out (as .jsonl), bench --json or --save (in .benchmarks), accuracy --json,"
        " or ncu --csv (as .csv) has written",
    )
    add(
        "--out", type=Path, default=Path("fourfold-report"), metavar="DIR", help="the folder: fourfold-report if absent"
    )
