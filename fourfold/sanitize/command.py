"""``fourfold sanitize SCRIPT [ARGUMENT ...]``: run a script with Triton kernels on the CPU, and report memory errors.

The script runs in its own process, because torch and Triton are unusable for anything else afterwards.
"""

import argparse
import dataclasses
import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fourfold.processes.child import become

DESCRIPTION = (
    "Run a Python script with Triton kernels on the CPU, though it was written for a GPU. Report every load and store"
    " outside of a tensor's memory, every load of memory that nothing has written, and every race between programs."
    " The exit code is 1 where there is an error, or the script fails."
)
# Variables that must be set before a process imports Triton and torch.
ENVIRONMENT = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}


def parser() -> argparse.ArgumentParser:
    """Return the argument parser. Arguments after the script belong to the script."""
    made = argparse.ArgumentParser(prog="fourfold sanitize", description=DESCRIPTION)
    made.add_argument(
        "--all-configs", action="store_true", help="run every configuration of a tuned kernel, not the first"
    )
    made.add_argument(
        "--capability", metavar="X.Y", type=capability, default=(9, 0), help="of the GPU that the script finds (9.0)"
    )
    made.add_argument("--json", metavar="FILE", type=Path, help="write the findings to this file")
    made.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module, such as pytest")
    made.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    made.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of the script")
    return made


def capability(text: str) -> tuple[int, int]:
    """Parse a compute capability, such as "9.0"."""
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def command(arguments: Sequence[str]) -> int:
    """Replace this process by the command: exit code 0 without an error, 1 with one, 2 for wrong arguments."""
    given = parser().parse_args(arguments)
    if not given.module and not Path(given.script).is_file():
        print(f"fourfold sanitize: SCRIPT: there is no file {given.script}", file=sys.stderr)
        return 2
    run = [sys.executable, "-m", "fourfold.sanitize.command", *arguments]
    return become(run, **ENVIRONMENT)


def say(text: Any) -> None:
    """Print to the user, in order with the script's own output."""
    sys.stdout.flush()
    print(f"fourfold: {text}" if isinstance(text, str) else text, file=sys.stderr, flush=True)


def run_script(given: argparse.Namespace) -> bool:
    """Run the script as Python would; return whether it succeeds."""
    sys.argv = [given.script, *given.arguments]
    try:
        if given.module:
            sys.path[0] = os.getcwd()
            runpy.run_module(given.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(given.script).resolve().parent)
            runpy.run_path(given.script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return not end.code
    except BaseException as error:
        # Omit the frames of this module and of runpy.
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
            shown = shown.tb_next
        traceback.print_exception(type(error), error, shown)
        return False
    return True


def main(arguments: Sequence[str]) -> int:
    """Run the command in the script's process; return the exit code."""
    from fourfold.backends.triton.sanitizer import monitor
    from fourfold.sanitize import absent_gpu

    given = parser().parse_args(arguments)
    report = monitor.Report(seen=say)
    with monitor.watching(report), absent_gpu.answered(given.all_configs, given.capability):
        well = run_script(given)
    summary = (
        f"{count(report.errors, 'error')} and {count(report.warnings, 'warning')} in"
        f" {report.launches} launches of {len(report.kernels)} kernels, {report.programs} programs"
    )
    say(summary if well else f"the script has failed; {summary}")
    if given.json:
        findings = [dataclasses.asdict(finding) for finding in report.findings.values()]
        numbers = {"kernels": sorted(report.kernels), "launches": report.launches, "programs": report.programs}
        given.json.write_text(json.dumps({"ended_well": well, "findings": findings, **numbers}, indent=2))
    return int(bool(report.errors) or not well)


def count(things: Sequence[Any], name: str) -> str:
    """Return the number of things with their name, such as "1 error" or "2 errors"."""
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
