"""Writes the tables of docs/public_kernels.md from the results of runs, so that no cell is typed in."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fourfold.operations.claims import Claims
from tests.public_kernels.judgements import JUDGEMENTS
from tests.public_kernels.kernels import KERNELS, Kernel

PAGE = Path(__file__).parents[2] / "docs" / "public_kernels.md"
# What the page says of each run, so that one run can be made again without all others.
KEPT = Path(__file__).with_name("results.jsonl")
NOT_RUN = "not run yet"
Results = dict[tuple[str, str, str], dict[str, Any]]
COLUMNS = ["kernel", "CPU, no claims", "H200, no claims", "its claims", "CPU, its claims", "H200, its claims"]
COLUMNS += ["suggested claims", "judgement"]
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


def read_results(*files: Path) -> Results:
    """Return the results in some files, by kernel, claims and device.

    Of two results of the same run, that of the last file stands, but for one that was not finished. A result with other
    claims than the kernel has now is left out.
    """
    found: Results = {}
    claims = {kernel.name: {"none": "", "own": str(kernel.claims)} for kernel in KERNELS}
    for file in files:
        for line in file.read_text().splitlines():
            each = json.loads(line)
            run = each["kernel"], each["claimed"], each["device"]
            is_known = each.get("claims", "") in ("", claims.get(each["kernel"], {}).get(each["claimed"]))
            is_known |= each["claimed"] == "suggested"
            if is_known and ("error" not in each or run not in found):
                found[run] = each
    return found


def all_results(folder: Path) -> Results:
    """Return the results that are kept, and those of ``verdicts*.jsonl`` in a folder, which come before them."""
    return read_results(*([KEPT] if KEPT.exists() else []), *sorted(folder.glob("verdicts*.jsonl")))


def keep(results: Results) -> None:
    """Write down what the page needs of each result, a line each."""
    names = [kernel.name for kernel in KERNELS]
    lines = []
    for result in sorted(results.values(), key=lambda x: (names.index(x["kernel"]), x["claimed"], x["device"])):
        kept = {name: result[name] for name in ("kernel", "version", "claimed", "device", "claims") if name in result}
        if "error" in result:
            kept["error"] = outcome_cell(result)
        else:
            kept |= {name: result[name] for name in ("passed", "grade")}
            kept["versions"] = {name: result["versions"][name] for name in ("torch", "triton")}
            kept["refusals"] = {"": total} if (total := sum(result["refusals"].values())) else {}
            kept["failures"] = [first_failure(result).replace("\n", ": ", 1)] if result["failures"] else []
        lines.append(json.dumps(kept) + "\n")
    KEPT.write_text("".join(lines))


def outcome_cell(result: dict[str, Any] | None) -> str:
    """Return the outcome of a run as a cell."""
    if result is None:
        return NOT_RUN
    if "error" in result:
        limit = re.search(r"not finished within \d+ seconds", result["error"])
        return limit[0] if limit else "ended: " + result["error"].splitlines()[-1].replace("|", "\\|")
    refused = sum(result["refusals"].values())
    if refused and not result["passed"] and not result["failures"]:
        return f"refused all: {refused}"
    grade = result["grade"] if result["passed"] or result["failures"] else "nothing was verified"
    return f"{'passed' if result['passed'] else 'failed'}, {grade}" + (f", {refused} refused" if refused else "")


def row(kernel: Kernel, results: Results) -> str:
    """Return a kernel's row of the table."""
    free = [outcome_cell(results.get((kernel.name, "none", device))) for device in ("cpu", "cuda")]
    claims, bound = "none", ["", ""]
    if kernel.claims != Claims():
        claims = f"`{kernel.claims}`"
        bound = [outcome_cell(results.get((kernel.name, "own", device))) for device in ("cpu", "cuda")]
    within = suggestion(results.get((kernel.name, "suggested", "cpu")))
    return "| " + " | ".join([kernel.name, *free, claims, *bound, within, JUDGEMENTS[kernel.name]]) + " |\n"


def suggestion(result: dict[str, Any] | None) -> str:
    """Return the claims within which a kernel passes that fails without any, as a cell."""
    if result is None or "error" in result or not result["passed"]:
        return outcome_cell(result)
    return f"`{result['claims']}`" if result["claims"] else ""


def counterexamples(kernels: Sequence[Kernel], results: Results) -> Iterator[str]:
    """Yield the first reported failure of each kernel: with its claims if it fails with them, else without."""
    for kernel in kernels:
        ways = [(which, device) for which in ("own", "none") for device in ("cpu", "cuda")]
        runs = [results.get((kernel.name, *way)) for way in ways]
        failed = next((run for run in runs if run is not None and run.get("failures")), None)
        if failed is None:
            continue
        check, message, *more = (line.strip() for line in first_failure(failed).splitlines())
        claims = "with its claims" if failed["claimed"] == "own" else "without claims"
        yield (
            f"- **{kernel.name}**, {claims}, {check}:\n  {message}"
            + "".join(f";\n  {line}" for line in more[:1])
            + "\n"
        )


def first_failure(result: dict[str, Any]) -> str:
    """Check and dtype, message, and the shapes of the first failure, a line each."""
    head, message = result["failures"][0].split(": ", 1)
    lines = re.sub(r"^[^:]* · [^:]*: ", "", message).splitlines()
    return "\n".join([head, lines[0], *[line for line in lines[1:] if line.startswith("with ")]])


def count(kernels: Sequence[Kernel], results: Results) -> str:
    """Return how many kernels there are, and how many passed, in a few sentences."""
    projects = {kernel.project for kernel in kernels}
    lines = [f"These are {len(kernels)} kernels of {len(projects)} projects."]
    for device, name in (("cpu", "the CPU"), ("cuda", "an H200")):
        free = [results.get((kernel.name, "none", device)) for kernel in kernels]
        own = [results.get((kernel.name, "none" if kernel.claims == Claims() else "own", device)) for kernel in kernels]
        if not any(free) and not any(own):
            continue
        both = sum(1 for one, two in zip(free, own) if one and two)
        free_passed, own_passed = count_passed(free), count_passed(own)
        line = f"On {name} {both} ran in both ways: {free_passed} pass without claims, {own_passed} with their own"
        within = [results.get((kernel.name, "suggested", device)) for kernel in kernels]
        if any(within):
            line += f", {count_passed(within)} with the claims that their verdicts suggest"
        machines = {
            f"torch {each['versions']['torch']}, Triton {each['versions']['triton']}"
            for each in results.values()
            if each["device"] == device and "versions" in each
        }
        lines.append(f"{line} ({'; '.join(sorted(machines))}).")
    return "\n".join(lines) + "\n"


def count_passed(results: Iterable[dict[str, Any] | None]) -> int:
    """Return the number of runs that passed."""
    return sum(1 for result in results if result is not None and result.get("passed", False))


def write_page(page: str, results: Results) -> str:
    """Return a page with its generated parts, between pairs of HTML comments, replaced by those of the results."""
    parts = {
        "count": count(KERNELS, results),
        "table": HEAD + "".join(row(kernel, results) for kernel in KERNELS),
        "counterexamples": "".join(counterexamples(KERNELS, results)),
    }
    for name, text in parts.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        page, replaced = between.subn(lambda found, text=text: f"{found[1]}\n{text}\n{found[2]}", page)  # type: ignore[misc]
        if replaced != 1:
            raise ValueError(f"the page has {replaced} parts named {name}")
    return page
