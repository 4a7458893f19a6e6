"""``fourfold grade``: the command line of `fourfold.grading.driver.grade`."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fourfold.engine.verification import EXAMPLES
from fourfold.grading import report
from fourfold.grading.candidates import BadCandidate
from fourfold.grading.driver import chosen, grade, of_file
from fourfold.grading.pool import NoWorkers
from fourfold.grading.progress import ProgressDisplay
from fourfold.grading.results import Graded, InUse
from fourfold.processes.stop import Stop

DESCRIPTION = "judge many candidates, each in a process of its own"


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    made = argparse.ArgumentParser(prog="fourfold grade", description=DESCRIPTION)
    made.add_argument("candidates", type=Path, metavar="CANDIDATES.jsonl", help="a line of JSON for each candidate")
    made.add_argument("--out", type=Path, metavar="FILE", help="append each result, and go on where FILE stops")
    made.add_argument("--report", type=Path, metavar="DIR", help="write a page that filters by verdict")
    made.add_argument("--id", action="append", default=[], metavar="ID", help="judge this candidate alone")
    made.add_argument("--workers", type=int, metavar="N", help="how many judge at once; one a processor unless given")
    made.add_argument("--gpus", type=int, default=0, choices=(0, 1), help="1 for kernels that run on a GPU")
    made.add_argument("--ray", metavar="ADDRESS", help="let the machines of a Ray cluster judge, as at auto")
    made.add_argument("--seed", type=int, metavar="N", help="of the generated cases")
    made.add_argument(
        "--examples", type=int, default=EXAMPLES, metavar="N", help=f"cases a check; {EXAMPLES} if absent"
    )
    made.add_argument("--dtype", action="append", default=[], metavar="NAME", help="look at this dtype alone")
    made.add_argument("--all-failures", action="store_true", help="go on with what is wrong, until all is found")
    made.add_argument("--no-refusals", action="store_true", help="an exception of a candidate's own is a failure")
    made.add_argument("--strict-errors", action="store_true", help="bad input must raise the declared errors")
    made.add_argument("--forbid-fallback", action="store_true", help="torch may allocate memory, and not compute")
    made.add_argument("--forbid-imports", default="", metavar="A,B", help="modules that no source may import")
    made.add_argument("--speed", action="store_true", help="time what is right beside the reference; needs --gpus 1")
    return made


def command(arguments: Sequence[str]) -> int:
    """Run ``fourfold grade``; return 0 if every candidate has a verdict, 2 for bad arguments, 130 after Ctrl-C."""
    options = parser()
    given = options.parse_args(arguments)
    if not given.candidates.is_file():
        options.error(f"{given.candidates} is no file")
    with Stop() as stop:
        return grade_file(given, stop)


def grade_file(given: argparse.Namespace, stop: Stop) -> int:
    """Grade the file that the options name; return the exit code."""
    console = Console(stderr=True, highlight=False)
    graded: list[Graded] = []
    watched: ProgressDisplay | None = None
    try:
        total = sum(1 for _ in chosen(of_file(given.candidates), given.id))
        verdicts = grade(
            given.candidates,
            out=given.out,
            workers=given.workers,
            gpus=given.gpus,
            ray=given.ray,
            seed=given.seed,
            only=tuple(given.id),
            examples=given.examples,
            dtypes=tuple(given.dtype),
            first_failure=not given.all_failures,
            refusals=not given.no_refusals,
            strict_errors=given.strict_errors,
            forbid_fallback=given.forbid_fallback,
            forbid_imports=tuple(name for name in given.forbid_imports.split(",") if name),
            speed=given.speed,
        )
        with ProgressDisplay(total, console) as watched, contextlib.closing(verdicts):
            graded.extend(one for one in watched.each(verdicts) if given.id or given.report)
    except (ValueError, BadCandidate, NoWorkers, InUse, ModuleNotFoundError, ConnectionError) as error:
        print(f"fourfold grade: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = f"; the same command goes on: {given.out} has what is judged" if given.out else ""
        print(f"fourfold grade: interrupted{kept}", file=sys.stderr)
        return stop.status
    finally:
        if watched is not None and watched.counts:
            watched.tell()
        if given.report is not None and graded:
            print(f"report: {report.write(graded, given.report)}", file=sys.stderr)
    if given.id:
        print("\n\n".join(map(str, graded)))
    return 0
