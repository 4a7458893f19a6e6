"""The report: an index page that lists and filters all candidates, and a page for each with its counterexample."""

import re
from collections.abc import Sequence
from pathlib import Path

from fourfold.engine.pages import page
from fourfold.grading.results import Graded
from fourfold.operations.outcomes import Kind


def write(graded: Sequence[Graded], folder: Path, back: str = "") -> Path:
    """Write the pages; return the path of the index.

    Args:
        graded: the verdicts.
        folder: the folder for the pages. It is created if necessary.
        back: the address of the page that links to the index; "" for none.
    """
    pages = folder / "candidates"
    pages.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, verdict in enumerate(graded):
        name = f"{number:05}-{re.sub(r'[^A-Za-z0-9._-]+', '_', verdict.id)[:60]}.html"
        (pages / name).write_text(verdict.html(back="../index.html"), encoding="utf-8")
        failure = verdict.failures[0][1] if verdict.failures else None
        rows.append(
            {
                "id": verdict.id,
                "kind": verdict.kind,
                "stage": verdict.stage,
                "operation": verdict.operation,
                "seconds": verdict.seconds,
                "reward": verdict.reward(),
                "page": f"candidates/{name}",
                "message": failure.message if failure else "; ".join(verdict.shortcomings),
                "counterexample": (failure.counterexample if failure else None) or "",
            }
        )
    counts = {kind: sum(verdict.kind == kind for verdict in graded) for kind in Kind}
    index = folder / "index.html"
    nonzero = {kind: count for kind, count in counts.items() if count}
    index.write_text(page("grading/report.html", back, rows=rows, counts=nonzero, total=len(graded)), encoding="utf-8")
    return index
