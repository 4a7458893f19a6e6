"""The report: one self-contained HTML page with the results of verification and benchmarks.

Verification and benchmarks are separate runs. Each writes its part as JSON into the report's folder and renders the
page from all parts that are there.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fourfold.engine.pages import page
from fourfold.engine.verdict import Finding
from fourfold.numerics.dtypes import DTYPES
from fourfold.performance.calls import HOST
from fourfold.performance.charts import Point, chart, quantity, sparkline
from fourfold.performance.gate import Change, short_name
from fourfold.performance.timings import PeerComparison, comparisons, contenders
from fourfold.processes.files import write_atomically

PARTS = ("verification", "performance")
# A contender has the same colour in every chart. All others share one more colour.
CONTENDERS = ("torch", "triton", "cuda", "candidate", "compile", "library")
RUNS_SHOWN = 60
# A number in a message, with what else differs from case to case: its sign, and a list of numbers.
NUMBERS = re.compile(r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\bnan\b|\binf\b)(?:, \d+)*")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def cause_of(failure: Finding | None) -> str:
    """Return the cause of a failure: the line that raised an exception, the wrong result, or else the message.

    A result that is wrong in one check is wrong in others, which report it for other cases. Numbers make no difference.

    Args:
        failure: the failure; None if there is none.
    """
    if failure is None:
        return ""
    if failure.result and not failure.frames:
        return f"{failure.kind}: {failure.result} is not as expected"
    if failure.cause:
        return failure.cause
    (first, *_) = failure.message.splitlines() or [""]
    # The message begins with the cell, whose dtype is not a cause.
    message = first.partition(": ")[2] if " · " in first.partition(": ")[0] else first
    return f"{failure.kind}: {NUMBERS.sub('N', message)}" if message else ""


def verification(
    tallies: Mapping[Any, Any], failures: Sequence[Mapping[str, Any]], about: Mapping[str, str]
) -> dict[str, Any]:
    """Return a verification run's part of the report.

    Args:
        tallies: those of the run, by cell, as in the table at its end.
        failures: for each failed test its name, its message, the command that repeats it, its cell (None if it has
            none) and its cause.
        about: date, commit, device, profile and versions.
    """
    cells = [
        {**vars(cell), **vars(tally), "kinds": sorted(tally.kinds), "boundary": tally.boundary.claim()}
        for cell, tally in tallies.items()
    ]
    return {"about": dict(about), "cells": cells, "failures": list(failures)}


def performance(
    benchmarks: Sequence[Mapping[str, Any]],
    machine: Mapping[str, str],
    ceilings: Mapping[str, Any],
    static: Mapping[str, Any],
    history: Iterable[Mapping[str, Any]],
    changes: Sequence[Change],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return a benchmark run's part of the report.

    Args:
        benchmarks: pytest-benchmark's benchmarks as flat dictionaries.
        machine: the machine on which they ran.
        ceilings: the ceilings of its device.
        static: the resources that the kernels need.
        history: the records of earlier runs on this machine, oldest first.
        changes: the gate's verdicts.
        notes: the lines of the comparison's summary.
    """
    keys = ("fullname", "group", "median", "iqr", "rounds", "extra_info")
    runs = [
        {
            "datetime": run["datetime"],
            "medians": {entry["fullname"]: entry["stats"]["median"] for entry in run["benchmarks"]},
        }
        for run in history
    ]
    return {
        "machine": dict(machine),
        "ceilings": dict(ceilings),
        "static": dict(static),
        "benchmarks": [
            {key: entry[key] for key in keys} for entry in benchmarks if entry["extra_info"].get("contender")
        ],
        "history": runs[-RUNS_SHOWN:],
        "verdicts": [vars(change) for change in changes],
        "notes": list(notes),
    }


def saved_performance(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the report from a run that pytest-benchmark has saved.

    Args:
        run: its JSON.

    Raises:
        KeyError: the run is not one of this project's benchmarks.
    """
    commit = run["commit_info"]["id"][:12] + ("-dirty" if run["commit_info"]["dirty"] else "")
    date = datetime.fromisoformat(run["datetime"]).strftime("%Y-%m-%d %H:%M UTC")
    of_run = {"date": date, "commit": "" if run["commit_info"]["id"] == "unversioned" else commit}
    benchmarks = [{**entry, **entry["stats"]} for entry in run["benchmarks"]]
    machine = {**of_run, **run["machine_info"]["fourfold"]}
    return performance(benchmarks, machine, run["ceilings"], run["static"], [], [], [])


def write(directory: Path, part: str, content: Mapping[str, Any], back: str = "") -> Path:
    """Write one of `PARTS` into the folder and render the page.

    Args:
        directory: the folder.
        part: the part's name.
        content: the part.
        back: the address of the page that links to it; "" for none.

    Returns:
        The path of the page.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / f"{part}.json", json.dumps(content).encode())
    parts = {name: read(directory / f"{name}.json") for name in PARTS}
    index = directory / "index.html"
    write_atomically(index, render(parts["verification"], parts["performance"], back).encode())
    return index


def read(path: Path) -> dict[str, Any] | None:
    """Return the record of a former run, or None if it is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict):
            return record
    return None


def render(verified: Mapping[str, Any] | None, timed: Mapping[str, Any] | None, back: str = "") -> str:
    """Render the page from the parts that exist."""
    causes = _causes(verified["failures"]) if verified else []
    rows = peer_comparisons(timed) if timed else []
    dtypes = {cell["dtype"] for cell in verified["cells"]} if verified else set()
    return page(
        "performance/report.html",
        back,
        quantity=quantity,
        short=short_name,
        plain=lambda text: ESCAPES.sub("", text),
        verified=verified,
        timed=timed,
        matrix=_matrix(verified) if verified else {},
        causes=causes,
        causes_of=_causes_of(causes),
        dtypes=[name for name in DTYPES if name in dtypes],
        colours=list(CONTENDERS),
        rooflines=_rooflines(timed) if timed else [],
        sizes=_sizes(timed) if timed else {},
        histories=_histories(timed) if timed else [],
        groups=_groups(timed) if timed else {},
        compared=rows,
        contenders=contenders(rows),
    )


def colour(contender: str) -> str:
    """Return the CSS class of a contender, or of the backend that its name ends with."""
    contender = {"compiled": "compile", "04_compiled": "compile", "cublas": "library"}.get(contender, contender)
    for place, name in enumerate(CONTENDERS):
        if contender == name or contender.endswith(f"_{name}"):
            return f"c{place}"
    return f"c{len(CONTENDERS)}"


def _matrix(verified: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for cell in sorted(verified["cells"], key=lambda cell: cell["operation"]):
        rows.setdefault(cell["operation"], {}).setdefault(cell["backend"], {})[cell["dtype"]] = cell
    return rows


def _causes(failures: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the failures by operation, backend and cause, in the order in which each came first."""
    rows: dict[Any, dict[str, Any]] = {}
    for failure in failures:
        cell = failure["cell"]
        # A failure without a known cause is unlike any other.
        key = (cell["operation"], cell["backend"], failure["cause"]) if cell and failure["cause"] else failure["name"]
        row = rows.setdefault(key, {"number": len(rows) + 1, "cause": failure["cause"], "cells": [], "failures": []})
        row["failures"].append(failure)
        if cell and cell not in row["cells"]:
            row["cells"].append(cell)
    return list(rows.values())


def _causes_of(causes: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], list[int]]:
    """Return the numbers of the causes by which each cell has failed."""
    numbers: dict[tuple[str, str, str], list[int]] = {}
    for cause in causes:
        for cell in cause["cells"]:
            numbers.setdefault((cell["operation"], cell["backend"], cell["dtype"]), []).append(cause["number"])
    return numbers


def _title(entry: Mapping[str, Any]) -> str:
    fraction = entry["extra_info"].get("fraction_of_ceiling")
    share = f", {fraction:.1%} of the ceiling" if fraction else ""
    return f"{short_name(entry['fullname'])}: {quantity(entry['median'], 's')}{share}"


def _rooflines(timed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Draw a roofline for each dtype: flop per second over flop per byte, under the device's ceilings."""
    charts = []
    ceilings = timed["ceilings"]
    for dtype in DTYPES:
        series: dict[str, list[Point]] = {}
        for entry in timed["benchmarks"]:
            info = entry["extra_info"]
            if info["dtype"] == dtype and info["flops"] and info["bytes"] and info["direction"] != HOST:
                point = Point(info["flops"] / info["bytes"], info["flops"] / entry["median"], _title(entry))
                series.setdefault(info["contender"], []).append(point)
        if not series:
            continue
        bandwidth, peak = ceilings["bytes_per_second"], ceilings["flops_per_second"][dtype]
        knee = peak / bandwidth
        left = min(point.x for points in series.values() for point in points) / 2
        right = max(knee * 4, *(2 * point.x for points in series.values() for point in points))
        limits = [
            (Point(left, left * bandwidth, ""), Point(knee, peak, f"{quantity(bandwidth, 'B/s')}, the fastest stream")),
            (Point(knee, peak, ""), Point(right, peak, f"{quantity(peak, 'flop/s')}, torch.matmul")),
        ]
        label = f"Roofline of {dtype}: operations a second over operations a byte"
        classes = {name: colour(name) for name in series}
        svg = chart(series, classes, ("flop per byte", ""), ("computed", "flop/s"), label, joined=False, limits=limits)
        charts.append({"dtype": dtype, "svg": Markup(svg), "classes": classes})
    return charts


def _sizes(timed: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Draw, for each operation, dtype and direction, the time over the bytes of a call."""
    series: dict[tuple[str, str, str], dict[str, list[Point]]] = {}
    for entry in timed["benchmarks"]:
        info = entry["extra_info"]
        if info["bytes"]:
            lines = series.setdefault((info["operation"], info["dtype"], info["direction"]), {})
            lines.setdefault(info["contender"], []).append(Point(info["bytes"], entry["median"], _title(entry)))
    charts: dict[str, list[dict[str, Any]]] = {}
    for (operation, dtype, direction), lines in series.items():
        by_bytes = {name: sorted(points, key=lambda point: point.x) for name, points in lines.items()}
        label = f"{operation}, {dtype}, {direction}: seconds over bytes"
        classes = {name: colour(name) for name in by_bytes}
        svg = Markup(chart(by_bytes, classes, ("moved", "B"), ("time", "s"), label))
        charts.setdefault(operation, []).append({"title": f"{dtype} {direction}", "svg": svg, "classes": classes})
    return charts


def _histories(timed: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for entry in timed["benchmarks"]:
        past = [run["medians"][entry["fullname"]] for run in timed["history"] if entry["fullname"] in run["medians"]]
        if past:
            values = [*past, entry["median"]]
            change = entry["median"] / past[-1] - 1
            rows.append({"name": entry["fullname"], "svg": Markup(sparkline(values)), "change": change, **entry})
    return sorted(rows, key=lambda row: -row["change"])


def peer_comparisons(timed: Mapping[str, Any]) -> list[PeerComparison]:
    """Return a part's comparisons; none on the CPU, whose times say nothing about kernels."""
    return comparisons(timed["benchmarks"]) if timed["machine"].get("device") == "cuda" else []


def _groups(timed: Mapping[str, Any]) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    by_operation: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for entry in sorted(timed["benchmarks"], key=lambda entry: entry["median"]):
        by_operation.setdefault(entry["extra_info"]["operation"], {}).setdefault(entry["group"], []).append(entry)
    return {operation: dict(sorted(groups.items())) for operation, groups in sorted(by_operation.items())}
