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


def command(given: argparse.Namespace) -> int:
    """Run ``fourfold grade``; return 0 if every candidate has a verdict, 2 for bad arguments, 130 after Ctrl-C."""
    if not given.candidates.is_file():
        given.error(f"{given.candidates} is no file")
    with Stop() as stop:
        return grade_file(given, stop)


def grade_file(given: argparse.Namespace, stop: Stop) -> int:
    """Grade the file that the options name; return the exit code."""
    console = Console(stderr=True, highlight=False)
    graded: list[Graded] = []
    watched: ProgressDisplay | None = None
    try:
        total = sum(1 for _ in select(read_candidates(given.candidates), given.id))
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
        hint = f"; the same command resumes: {given.out} has the finished verdicts" if given.out else ""
        print(f"fourfold grade: interrupted{hint}", file=sys.stderr)
        return stop.status
    finally:
        if watched is not None and watched.counts:
            watched.tell()
        if given.report is not None and graded:
            print(f"report: {report.write(graded, given.report)}", file=sys.stderr)
    if given.id:
        print("\n\n".join(map(str, graded)))
    return 0
