"""``fourfold sanitize SCRIPT [ARGUMENT ...]``: run a script with Triton kernels on the CPU, and report memory errors.

Each script runs in its own process, because torch and Triton are unusable for anything else afterwards.
"""

import argparse
import dataclasses
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from fourfold.processes.child import become
from fourfold.sanitize import folder

DESCRIPTION = (
    "Run a Python script with Triton kernels on the CPU, even if it was written for a GPU. Report every load and store"
    " outside of a tensor's memory, every load of memory that nothing has written, and every race between programs."
    " The exit code is 1 where there is an error, or the script fails."
)
# Variables that must be set before a process imports Triton and torch.
ENVIRONMENT = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options. Arguments after the script belong to the script."""
    add = parser.add_argument
    add("--all-configs", action="store_true", help="run every configuration of a tuned kernel, not the first")
    add("--capability", metavar="X.Y", type=capability, default=(9, 0), help="of the GPU that the script finds (9.0)")
    add("--json", metavar="FILE", type=Path, help="write the findings to this file")
    add("--timeout", metavar="SECONDS", type=positive, help="stop a script after this time (never)")
    add("--jobs", metavar="N", type=positive, default=os.cpu_count(), help="scripts of a folder at once")
    add("-m", dest="module", action="store_true", help="SCRIPT is the name of a module, such as pytest")
    what = "a Python file, a folder whose Python files run one by one, or with -m a module"
    add("script", metavar="SCRIPT", help=what)
    add("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of the script")


def capability(text: str) -> tuple[int, int]:
    """Parse a compute capability, such as "9.0"."""
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def positive(text: str) -> int:
    """Parse a number from 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text}")
    return number


def command(options: argparse.Namespace) -> int:
    """Replace this process by the command: exit code 0 without an error, 1 with one, 2 for wrong arguments."""
    path = Path(options.script)
    if not options.module and path.is_dir():
        return run_folder(options)
    if not options.module and not path.is_file():
        options.error(f"SCRIPT: there is no file or folder {options.script}")
    run = [sys.executable, "-m", "fourfold.sanitize.command", *options.words]
    return become(run, **ENVIRONMENT)


def run_folder(options: argparse.Namespace) -> int:
    """Run every script of a folder; return the exit code."""
    if options.arguments:
        options.error("ARGUMENT: the scripts of a folder get no arguments")
    command = [__name__, "--capability", ".".join(map(str, options.capability))]
    command += ["--all-configs"] * options.all_configs
    return folder.run(Path(options.script), command, ENVIRONMENT, options.timeout, options.jobs, options.json)


class TimeIsUp(BaseException):
    """The script has not ended in its time. No handler of the script's own catches this."""

    __module__ = "__main__"  # a report names it without its module


def stop_after(seconds: int) -> None:
    """Raise `TimeIsUp` in the script after this time."""

    def stop(*signal: object) -> NoReturn:
        raise TimeIsUp(f"not done after {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)


def say(text: Any, errors: TextIO) -> None:
    """Print to the user, in order with the script's own output."""
    sys.stdout.flush()
    sys.stderr.flush()
    print(f"fourfold: {text}" if isinstance(text, str) else text, file=errors, flush=True)


def import_from(folder: str) -> None:
    """Import modules first from a folder, as Python does from that of its script."""
    sys.path[: not sys.flags.safe_path] = [folder]


def run_script(options: argparse.Namespace) -> str | None:
    """Run the script as Python would; return the error that ended it, or None if it succeeds."""
    sys.argv = [options.script, *options.arguments]
    try:
        if options.module:
            import_from(os.getcwd())
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            import_from(str(Path(options.script).resolve().parent))
            runpy.run_path(options.script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return f"SystemExit: {end.code}" if end.code else None
    except BaseException as error:
        # Omit the frames of this module and of runpy.
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
            shown = shown.tb_next
        traceback.print_exception(type(error), error, shown)
        return "".join(traceback.format_exception_only(error)).strip()
    return None


def main(*arguments: str) -> int:
    """Run the command in the script's process; return the exit code."""
    from fourfold.backends.triton.sanitizer import monitor
    from fourfold.engine import annotations
    from fourfold.sanitize import absent_gpu

    parser = argparse.ArgumentParser(prog="fourfold sanitize")
    add_options(parser)
    options = parser.parse_args(arguments)
    # A script such as pytest captures what is written to the descriptor of standard error.
    errors = os.fdopen(os.dup(sys.stderr.fileno()), "w")
    report = monitor.Report(on_finding=lambda finding: say(finding, errors))
    with monitor.watching(report), absent_gpu.emulate_gpu(options.all_configs, options.capability):
        if options.timeout:
            stop_after(options.timeout)
        failure = run_script(options)
        signal.alarm(0)
    summary = (
        f"{count(report.errors, 'error')} and {count(report.warnings, 'warning')} in"
        f" {report.launches} launches of {len(report.kernels)} kernels, {report.programs} programs"
    )
    say(f"the script has failed; {summary}" if failure else summary, errors)
    findings = [{**dataclasses.asdict(finding), "text": str(finding)} for finding in report.findings.values()]
    if annotations.in_github_actions():
        print(*annotations.violation_annotations(findings), sep="\n", file=errors, flush=True)
    if options.json:
        numbers = {"kernels": sorted(report.kernels), "launches": report.launches, "programs": report.programs}
        result = {"ended_well": failure is None, "failure": failure, "findings": findings, **numbers}
        options.json.write_text(json.dumps(result, indent=2))
    return int(bool(report.errors or failure))


def count(things: Sequence[Any], name: str) -> str:
    """Return the number of things with their name, such as "1 error" or "2 errors"."""
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
