"""``fourfold grade``: the command line of `fourfold.grading.driver.grade`."""

import argparse
import contextlib
import sys

from rich.console import Console

from fourfold.grading import report
from fourfold.grading.candidates import BadCandidate
from fourfold.grading.driver import grade, read_candidates, select
from fourfold.grading.pool import NoWorkers
from fourfold.grading.progress import ProgressDisplay
from fourfold.grading.results import Graded, InUse
from fourfold.processes.stop import Stop


def command(args: argparse.Namespace) -> int:
    """Run ``fourfold grade``; return 0 if every candidate has a verdict, 2 for bad arguments, 130 after Ctrl-C."""
    if not args.candidates.is_file():
        args.error(f"{args.candidates} is no file")
    with Stop() as stop:
        return grade_file(args, stop)


def grade_file(args: argparse.Namespace, stop: Stop) -> int:
    """Grade the file that the options name; return the exit code."""
    console = Console(stderr=True, highlight=False)
    graded: list[Graded] = []
    display: ProgressDisplay | None = None
    try:
        total = sum(1 for _ in select(read_candidates(args.candidates), args.id))
        verdicts = grade(
            args.candidates,
            out=args.out,
            workers=args.workers,
            gpus=args.gpus,
            ray=args.ray,
            seed=args.seed,
            only=tuple(args.id),
            examples=args.examples,
            dtypes=tuple(args.dtype),
            first_failure=not args.all_failures,
            refusals=not args.no_refusals,
            strict_errors=args.strict_errors,
            forbid_fallback=args.forbid_fallback,
            forbid_imports=tuple(name for name in args.forbid_imports.split(",") if name),
            speed=args.speed,
        )
        with ProgressDisplay(total, console) as display, contextlib.closing(verdicts):
            graded.extend(verdict for verdict in display.track(verdicts) if args.id or args.report)
    except (ValueError, BadCandidate, NoWorkers, InUse, ModuleNotFoundError, ConnectionError) as error:
        print(f"fourfold grade: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        hint = f"; the same command resumes: {args.out} has the finished verdicts" if args.out else ""
        print(f"fourfold grade: interrupted{hint}", file=sys.stderr)
        return stop.status
    finally:
        if display is not None and display.counts:
            display.tell()
        if args.report is not None and graded:
            print(f"report: {report.write(graded, args.report)}", file=sys.stderr)
    if args.id:
        print("\n\n".join(map(str, graded)))
    return 0
