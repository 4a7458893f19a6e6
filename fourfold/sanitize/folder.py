"""Run every script of a folder under the sanitizer, each in its own process, and summarize."""

import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from fourfold.engine import annotations
from fourfold.processes.child import Child
from fourfold.processes.stop import Stop

# The seconds that a script which is out of time has to write its findings.
GRACE_SECONDS = 30
# The last lines of a process that ended without a report.
LINES_SHOWN = 3


def run(
    path: Path, command: Sequence[str], variables: dict[str, str], seconds: int | None, jobs: int, output: Path | None
) -> int:
    """Run every script of a folder and print each one's findings, in the order of their names; return the exit code.

    Args:
        path: the folder.
        command: the sanitizer's module and its options; a script's path follows.
        variables: of the environment of each process.
        seconds: a script's time; None for no limit.
        jobs: the number of scripts at once.
        output: the file that gets all findings as JSON; None for no file.
    """
    scripts = sorted(path.glob("*.py"))
    if not scripts:
        print(f"fourfold sanitize: SCRIPT: there is no Python file in the folder {path}", file=sys.stderr)
        return 2
    results: dict[str, dict[str, Any]] = {}
    run_one = partial(run_script, command, variables, seconds)
    with Stop() as stop, ThreadPoolExecutor(jobs) as pool:
        try:
            for script, result in zip(scripts, pool.map(run_one, scripts)):
                results[script.name] = result
                print(describe(script.name, result), flush=True)
                if annotations.in_github_actions():
                    print(*annotations.violation_annotations(result["findings"]), sep="\n", flush=True)
                if output:  # also what an interrupted run has found
                    output.write_text(json.dumps({"scripts": results}, indent=2))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
    print(summary(results))
    if stop.signal is not None:
        return stop.status
    return int(any(result["failure"] or errors(result) for result in results.values()))


def run_script(command: Sequence[str], variables: dict[str, str], seconds: int | None, script: Path) -> dict[str, Any]:
    """Run one script; return what it writes with ``--json``."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "findings.json")
        limit = [] if seconds is None else ["--timeout", str(seconds)]
        child = Child.spawn(
            *(*command, *limit, "--json", str(output), str(script)),
            environment={**os.environ, **variables},
            printed=True,
        )
        try:
            ended = child.wait(math.inf if seconds is None else seconds + GRACE_SECONDS)
        finally:
            death = child.kill()
        if output.is_file():
            return json.loads(output.read_text())
        failure = f"the process has {death.cause}" if ended and death else f"TimeIsUp: not done after {seconds} s"
        last = "\n".join(death.printed.splitlines()[-LINES_SHOWN:]) if death else ""
        return {"ended_well": False, "failure": f"{failure}: {last}", "findings": [], "launches": 0}


def errors(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings that are not warnings."""
    return [finding for finding in result["findings"] if not finding["warning"]]


def describe(name: str, result: dict[str, Any]) -> str:
    """Return the findings of a script as text."""
    outcome = f"failed: {result['failure']}" if result["failure"] else ""
    if not result["findings"]:
        return f"{name}: {outcome or 'no finding'}"
    return "\n".join([f"{name}: {outcome}".rstrip(), *(finding["text"] for finding in result["findings"])])


def summary(results: dict[str, dict[str, Any]]) -> str:
    """Return the numbers of scripts by their outcome, and the names of those that failed."""
    failed = {name: result["failure"] for name, result in results.items() if result["failure"]}
    wrong = [name for name, result in results.items() if errors(result)]
    silent = [name for name, result in results.items() if not result["findings"] and name not in failed]
    unlaunched = [name for name, result in results.items() if not result["launches"]]
    lines = [
        f"fourfold: {len(results)} scripts: {len(silent)} without a finding, {len(wrong)} with errors,"
        f" {len(failed)} failed, {len(unlaunched)} launched no kernel"
    ]
    return "\n".join([*lines, *(f"    {name}: {failure}" for name, failure in failed.items())])
