"""``fourfold report``: write pages from saved results of verify, grade, bench, accuracy and ncu, and their index."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.engine.cells import CANDIDATE
from fourfold.engine.pages import page
from fourfold.engine.verdict import Outcome, Verdict
from fourfold.engine.verification import source_of
from fourfold.grading import report as grading
from fourfold.grading.results import Graded
from fourfold.performance import accuracy, profile
from fourfold.performance import report as performance
from fourfold.performance.timings import Timing, column_names, comparisons, markdown

BACK, ACCURACY, PROFILE = "../index.html", "accuracy.json", ".csv"


class Entry(NamedTuple):
    """A line of a table.

    Attributes:
        cells: its texts; the first leads to the page.
        link: the address of the page; "" for none.
        kind: the class of the second text; "" for none.
    """

    cells: tuple[str, ...]
    link: str = ""
    kind: str = ""


class NoResult(ValueError):
    """A file holds no result that this command knows."""


def command(args: argparse.Namespace) -> int:
    """Write the pages; return 0, or 2 if a file holds no result."""
    rows: list[Entry] = []
    timed: dict[str, list[dict[str, Any]]] = {}
    exact: list[dict[str, Any]] = []
    profiled: dict[str, list[profile.Launch]] = {}
    for number, file in enumerate(args.results):
        name = f"{number:02}-{re.sub(r'[^A-Za-z0-9._-]+', '_', file.stem)[:60]}"
        try:
            rows += [row._replace(link=f"{name}/{row.link}") for row in pages_of(file, args.out / name)]
            if run := performance.read(args.out / name / ACCURACY):
                exact.append(run)
            if file.suffix == PROFILE:
                profiled |= profile.read(file)
            if measured := performance.read(args.out / name / "performance.json"):
                timed.setdefault(measured["machine"].get("gpu", ""), []).append(measured)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}" if not isinstance(error, OSError | ValueError) else error
            args.error(
                f"{file}: expected what verify --json, grade --out, bench --json or --save, accuracy --json or ncu"
                f" --csv write: {problem}"
            )
    index = args.out / "index.html"
    index.write_text(page("engine/table.html", title="Results", about="", names=("result", "", "of"), rows=rows))
    print(f"report: {index}")
    runs = [
        (parts[0]["machine"], comparisons(entry for measured in parts for entry in measured["benchmarks"]))
        for gpu, parts in timed.items()
        if gpu
    ]
    if runs or exact:
        path = args.out / "comparisons.md"
        limits = profile.markdown(profiled, (row for _, rows in runs for row in rows))
        path.write_text(
            markdown(runs) + limits + "".join(map(accuracy.markdown, accuracy.merged(exact))), encoding="utf-8"
        )
        print(f"kernels beside their peers: {path}")
    return 0


def pages_of(file: Path, folder: Path) -> Iterator[Entry]:
    """Write the pages of a file of results; yield a row of the index for each, with the address in the folder."""
    text = file.read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        graded = [Graded.from_json(line) for line in text.splitlines()]
        grading.write(graded, folder, BACK)
        count = sum(verdict.passed for verdict in graded)
        yield Entry((f"{len(graded)} candidates", f"{count} right", str(file)), "index.html")
        return
    if file.suffix == PROFILE:
        rows = [Entry((name, *profile.cells(call))) for name, call in profile.read(file).items()]
        names = ("benchmark", *profile.NAMES)
        table = page("engine/table.html", BACK, title="Profile", about=str(file), names=names, rows=rows)
        (folder / "index.html").write_text(table, encoding="utf-8")
        yield Entry((f"{len(rows)} calls", "profiled", str(file)), "index.html")
        return
    record = json.loads(text)
    if "benchmarks" in record:
        performance.write(folder, "performance", performance.saved_performance(record), BACK)
        yield Entry((f"{len(record['benchmarks'])} benchmarks", "timed", str(file)), "index.html")
    elif "not_measured" in record:
        (folder / ACCURACY).write_text(text, encoding="utf-8")
        heads, *lines = accuracy.table([accuracy.cells_of(row) for row in record["rows"]])
        rows = [Entry(tuple(line)) for line in lines]
        description = f"{file}. {accuracy.EXPLANATION}"
        table = page("engine/table.html", BACK, title="Accuracy", about=description, names=heads, rows=rows)
        (folder / "index.html").write_text(table, encoding="utf-8")
        yield Entry((f"accuracy of {len(rows)} results", "measured", str(file)), "index.html")
    elif "timings" in record:
        timed = [Timing(**entry) for entry in record["timings"]]
        rows = [Entry(tuple(timing.cells)) for timing in timed]
        table = page("engine/table.html", BACK, title="Timings", about=str(file), names=column_names(timed), rows=rows)
        (folder / "index.html").write_text(table, encoding="utf-8")
        yield Entry((f"{len(rows)} timings", "timed", str(file)), "index.html")
    elif "checks" in record:
        for number, verdict in enumerate(verdicts_of(record, text)):
            (folder / f"{number}.html").write_text(verdict.html(BACK), encoding="utf-8")
            name = f"{verdict.implementation} as {verdict.operation}"
            yield Entry((name, verdict.kind, str(file)), f"{number}.html", verdict.kind)
    else:
        raise NoResult(f"found {', '.join(record) or 'nothing'}")


def verdicts_of(record: Mapping[str, Any], text: str) -> Iterator[Verdict]:
    """Yield the verdict of a JSON, or those of a run of pytest, one for each implementation of an operation."""
    if "implementation" in record:
        yield Verdict.from_json(text)
        return
    split = (candidate.partition("=") for candidate in record.get("candidates", []))
    places = {operation.rpartition(":")[2]: place for operation, _, place in split}
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for check in record["checks"]:
        groups.setdefault((check["operation"], check["backend"]), []).append(check)
    for (operation, backend), checks in groups.items():
        place = places.get(operation, "") if backend == CANDIDATE else ""
        file = Path(place.partition("<<<")[0].rpartition(":")[0])
        yield Verdict(
            implementation=place or backend,
            operation=operation,
            device=record["device"],
            claims=record["claims"],
            outcomes=tuple(Outcome.of_check(check) for check in checks),
            shortcomings=tuple(record["shortcomings"]),
            warnings=(),
            versions=record["versions"],
            seed=0,
            seconds=sum(check.get("seconds", 0.0) for check in checks),
            suggested_claim=record["suggested_claim"],
            file=str(file),
            source=source_of(file),
        )
