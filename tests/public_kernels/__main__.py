"""Verify public kernels: ``python -m tests.public_kernels --folder DIR [--only NAME ...] [--device cpu] [--jobs 1]``.

Each kernel runs in a process of its own: without claims, with those that its documentation states, and, if it fails
without them, with those that its verdict suggests.
With ``--fetch-only`` the packages are downloaded and unpacked, and nothing is run: a later run needs no network.
With ``--page`` the tables of docs/public_kernels.md are written from ``DIR/verdicts*.jsonl``, and nothing is run.
``DIR/verdicts.jsonl`` gets a line for each run.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

import fourfold
from fourfold.backends.triton.interpreter import tuning
from fourfold.operations.claims import Claims
from tests.public_kernels import page, releases
from tests.public_kernels.kernels import KERNELS, Kernel


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.public_kernels", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where packages and results lie")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="kernels, as in liger-kernel/softmax")
    ways = ["none", "own", "suggested"]
    parser.add_argument("--claims", nargs="*", default=ways, choices=ways, help="the claims of each kernel's runs")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--examples", type=int, default=10, help="generated cases a check")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=int, default=300, help="seconds for one run of a kernel")
    parser.add_argument("--jobs", type=int, default=1, help="kernels that run at once")
    parser.add_argument("--fetch-only", action="store_true", help="download the packages, and run nothing")
    parser.add_argument("--missing", action="store_true", help="only runs that the folder has no result of")
    parser.add_argument("--page", action="store_true", help="write docs/public_kernels.md's tables, and run nothing")
    parser.add_argument("--child", choices=ways, help=argparse.SUPPRESS)
    options = parser.parse_args()
    known = {kernel.name: kernel for kernel in KERNELS}
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"--only: {', '.join(unknown)} is not among {', '.join(known)}")
    chosen = [known[name] for name in options.only] or list(KERNELS)
    if options.child:
        print(json.dumps(verdict(chosen[0], options)))
        return
    if options.page:
        results = page.all_results(options.folder)
        page.keep(results)
        page.PAGE.write_text(page.write_page(page.PAGE.read_text(), results))
        return
    for kernel in chosen:
        for package in (kernel.project, *kernel.needs):
            releases.unpack(options.folder, package)
    if not options.fetch_only:
        run_all(chosen, options)


def run_all(chosen: Sequence[Kernel], options: argparse.Namespace) -> None:
    """Verify kernels, several at once, and record each result when it is there."""
    # First what each claims of itself, if anything; then, without claims, those that claim something.
    runs = [(kernel, "own" if kernel.claims != Claims() else "none") for kernel in chosen]
    runs += [(kernel, "none") for kernel in chosen if kernel.claims != Claims()]
    runs += [(kernel, "suggested") for kernel in chosen]
    runs = [(kernel, which) for kernel, which in runs if which in options.claims]
    if options.missing:
        known = page.read_results(*sorted(options.folder.glob("verdicts*.jsonl")))
        runs = [(kernel, which) for kernel, which in runs if (kernel.name, which, options.device) not in known]
    with ThreadPoolExecutor(options.jobs) as pool:
        for ended in as_completed([pool.submit(run_in_process, kernel, which, options) for kernel, which in runs]):
            record(options.folder, ended.result())


def run_in_process(kernel: Kernel, which: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a process that runs one kernel has written, or why it has written nothing."""
    about = {"kernel": kernel.name, "version": releases.VERSIONS[kernel.project], "claimed": which}
    about["device"] = options.device
    command = [sys.executable, "-m", "tests.public_kernels", "--folder", str(options.folder), "--only", kernel.name]
    command += ["--device", options.device, "--examples", str(options.examples), "--seed", str(options.seed)]
    started = time.monotonic()
    try:
        ended = subprocess.run(
            [*command, "--child", which], capture_output=True, text=True, timeout=options.limit, check=False
        )
        written = ended.stdout.splitlines()[-1:]
        if written and written[0].startswith("{"):  # also of a process that a broken GPU context ends afterwards
            said = json.loads(written[0])
        else:
            last = "\n".join(ended.stderr.splitlines()[-5:])
            said = {"error": last or f"ended with status {ended.returncode}"}
    except subprocess.TimeoutExpired:
        said = {"error": f"not finished within {options.limit} seconds"}
    result = {**about, **said, "seconds": round(time.monotonic() - started, 1)}
    print(row(result), flush=True)
    return result


def verdict(kernel: Kernel, options: argparse.Namespace) -> dict[str, Any]:
    """Import a kernel and verify it in this process."""
    releases.on_path(options.folder, (kernel.project, *kernel.needs))
    releases.stand_in(kernel.unused)
    releases.without_init(kernel.bare)
    if torch.cuda.is_available():
        # To take the times of all configurations for each shape would take minutes a check.
        tuning.install()
    else:
        kernel.without_gpu()
    module, _, name = kernel.path.rpartition(":")
    imported = getattr(importlib.import_module(module), name)
    implementation = kernel.adapter(imported)
    implementation.__name__ = name
    found = fourfold.verify(
        implementation,
        kernel.operation,
        claims=kernel.claims if options.child == "own" else Claims(),
        device=options.device,
        dtypes=kernel.dtypes,
        examples=options.examples,
        seed=options.seed,
        accept=options.child == "suggested",
    )
    return {
        "machine": found.device,
        "versions": found.versions,
        "claims": found.claims,
        "passed": found.passed,
        "grade": found.grade,
        "worst": found.worst,
        "examples": found.examples,
        "refusals": dict(found.refusals),
        "warnings": list(found.warnings),
        "failures": [f"{outcome.check}, {outcome.dtype}: {finding}" for outcome, finding in found.failures],
        "shortcomings": list(found.shortcomings),
        "text": str(found),
    }


def record(folder: Path, result: dict[str, Any]) -> None:
    """Keep one result in place of an earlier one of the same run."""
    file = folder / "verdicts.jsonl"
    kept = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    same = ("kernel", "claimed", "device")
    kept = [old for old in kept if any(old[key] != result[key] for key in same)] + [result]
    names = [kernel.name for kernel in KERNELS]
    kept.sort(key=lambda each: (names.index(each["kernel"]) if each["kernel"] in names else -1, each["claimed"]))
    file.write_text("".join(json.dumps(each) + "\n" for each in kept))


def row(result: dict[str, Any]) -> str:
    """Return the line that is printed after a run."""
    said = "not run: " + result["error"].splitlines()[-1] if "error" in result else None
    passed = said or ("passed" if result["passed"] else "failed")
    refused = sum(result.get("refusals", {}).values())
    cells = [result["kernel"], result["version"], result.get("claims") or "none", passed, result.get("grade", "")]
    return "| " + " | ".join(str(cell) for cell in [*cells, refused, result["seconds"]]) + " |"


if __name__ == "__main__":
    main()
