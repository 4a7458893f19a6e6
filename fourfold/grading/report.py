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
    for number, one in enumerate(graded):
        name = f"{number:05}-{re.sub(r'[^A-Za-z0-9._-]+', '_', one.id)[:60]}.html"
        (pages / name).write_text(one.html(back="../index.html"), encoding="utf-8")
        failure = one.failures[0][1] if one.failures else None
        rows.append(
            {
                "id": one.id,
                "kind": one.kind,
                "stage": one.stage,
                "operation": one.operation,
                "seconds": one.seconds,
                "reward": one.reward(),
                "page": f"candidates/{name}",
                "message": failure.message if failure else "; ".join(one.shortcomings),
                "counterexample": (failure.counterexample if failure else None) or "",
            }
        )
    counts = {kind: sum(one.kind == kind for one in graded) for kind in Kind}
    index = folder / "index.html"
    nonzero = {kind: count for kind, count in counts.items() if count}
    index.write_text(page("grading/report.html", back, rows=rows, counts=nonzero, total=len(graded)), encoding="utf-8")
    return index
