"""The options of the plugin, for pytest and for ``fourfold verify``. This module imports neither torch nor pytest."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from fourfold.operations.limits import CALL_SECONDS, COMPILE_SECONDS


def add_options(add: Callable[..., object]) -> None:
    """Add the plugin's options.

    Args:
        add: `argparse.ArgumentParser.add_argument`, or pytest's ``OptionGroup.addoption``, which takes the same.
    """
    add("--op", action="append", default=[], metavar="NAME", help="only this operation (repeatable)")
    add("--backend", action="append", default=[], metavar="NAME", help="only this backend (repeatable)")
    add("--dtype", action="append", default=[], metavar="NAME", help="only this dtype (repeatable)")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: a GPU if there is one")
    add("--examples", type=int, metavar="N", help="generated cases for each check, instead of the profile's")
    add(
        "--candidate",
        action="append",
        default=[],
        metavar="OP=FILE_OR_MODULE:FUNCTION",
        help="verify this implementation of an operation; OP is the name of a known one, or FILE.py:OPERATION"
        " (repeatable)",
    )
    add("--forward-only", action="store_true", help="candidates need not have gradients")
    add("--forbid-fallback", action="store_true", help="candidates must not compute with torch's operators")
    add(
        "--claims",
        metavar="CLAIMS",
        help='what candidates claim, as in contiguous=True, sizes={"cols": (1, 1024)}, accuracy="storage"',
    )
    add("--no-refusals", action="store_true", help="a candidate's exception for a valid case is a failure")
    add("--strict-errors", action="store_true", help="candidates must raise the operation's declared errors")
    add(
        "--untrusted",
        action="store_true",
        help="run candidates in their own process, where they cannot change the judge",
    )
    add(
        "--untrusted-where-possible",
        action="store_true",
        help="the same for functions of Python on the CPU; run others in this process",
    )
    add(
        "--call-seconds",
        type=float,
        default=CALL_SECONDS,
        metavar="S",
        help=f"with --untrusted: the time limit of a call, {CALL_SECONDS:g} by default",
    )
    add(
        "--compile-seconds",
        type=float,
        default=COMPILE_SECONDS,
        metavar="S",
        help=f"on a GPU: the time limit of Triton's compiler for a kernel, {COMPILE_SECONDS:g} by default",
    )
    add("--verdict", type=Path, metavar="FILE", help="write the outcome of each check as JSON")
    add(
        "--executed",
        action="store_true",
        help="name the lines that never ran, of the library's own kernels too, whatever the run leaves out",
    )
    add("--reproduce", metavar="BLOB", help="run only the generated case that a failure named")
    add("--case", type=Path, metavar="FILE", help="run only the case that fourfold.monitor saved, and shrink it")
    add(
        "--sizes",
        type=sizes,
        action="append",
        default=[],
        metavar="AXIS=SIZE,...",
        help="of a benchmarked operation, in place of its workloads (repeatable)",
    )
    add("--warm-up", action="store_true", help="make the call of each benchmark to compile it, and time none")
    add("--timings", type=Path, metavar="FILE", help="write the times of a benchmarked kernel as JSON")
    add("--report", type=Path, metavar="DIR", help="write DIR/index.html, of this run and of others there")


def add_gate_options(add: Callable[..., object]) -> None:
    """Add the options of the gate, which compares the times of a run with those of another one."""
    add(
        "--perf-gate",
        action="store_true",
        help="after --benchmark-compare: measure what seems to have changed again, in turns, and fail if it is slower",
    )
    add("--perf-gate-seconds", type=float, default=4.0, metavar="S", help="for each benchmark that is measured again")
    add(
        "--perf-gate-trial",
        action="store_true",
        help="test the gate: how often it rejects unchanged code, and finds a planted slowdown",
    )
    add(
        "--perf-gate-slowdowns",
        type=slowdowns,
        default=slowdowns("1,2,5,10"),
        metavar="PERCENT[,PERCENT...]",
        help="that a trial plants (1,2,5,10); 0 for none",
    )


def sizes(text: str) -> dict[str, int]:
    """Parse the sizes of an option: "rows=4096,cols=1024"."""
    try:
        return {axis.strip(): int(size) for axis, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"sizes are wanted, as in rows=4096,cols=1024, not {text!r}") from None


def slowdowns(text: str) -> tuple[float, ...]:
    """Parse the percentages of an option: "1,5" gives 0.01 and 0.05, "0" gives none."""
    try:
        percentages = [float(part) for part in text.split(",")]
    except ValueError:
        percentages = [math.nan]
    if not all(0 <= percentage < math.inf for percentage in percentages):
        raise argparse.ArgumentTypeError(f"expected percentages such as 1,2,5,10, or 0, not {text!r}")
    return tuple(dict.fromkeys(percentage / 100 for percentage in percentages if percentage))


def names() -> dict[str, bool]:
    """Return the names of the options, each with whether it takes a value."""
    takes_value: dict[str, bool] = {}
    for add in (add_options, add_gate_options):
        add(lambda name, **settings: takes_value.__setitem__(name, settings.get("action") != "store_true"))
    return takes_value
