"""Generated kernels that others have published with their verdicts: runs of KernelBench.

Source: https://github.com/technoabsurdist/KernelBench, the folders `runs/`, at commit 9202a5c. Four models wrote a
`ModelNew` in CUDA C++ for each problem; KernelBench held it against `Model` on an A100, five times, to within 1e-2.
They need a GPU and nvcc. None of them is in this repository.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .labelled import RIGHT, WRONG, Labelled

COMMIT = "9202a5c5786ab959fcaa3b4ce0356348bb87c86a"
# What says nothing of a kernel: the machine was too small for the problem, or it was not compiled for it.
NO_VERDICT = re.compile(r"out of memory|no kernel image is available", re.IGNORECASE)


def candidates(checkout: Path) -> Iterator[Labelled]:
    """Each solution of a checkout of the source, with what KernelBench says of it.

    Raises:
        FileNotFoundError: the folder is no such checkout.
    """
    results = sorted(checkout.glob("runs/*_level*_run/eval_results.json"))
    if not results:
        raise FileNotFoundError(f"{checkout} has no runs/*_run/eval_results.json: it is no checkout of {COMMIT}")
    for file in results:
        level = int(re.search(r"level(\d)", file.parent.name)[1])  # type: ignore[index]
        for problem, said in json.loads(file.read_text()).items():
            found = _candidate(checkout, file.parent, level, problem, said[0] if isinstance(said, list) else said)
            if found is not None:
                yield found


def _candidate(checkout: Path, run: Path, level: int, problem: str, said: dict[str, Any]) -> Labelled | None:
    sources = list(run.glob(f"level_{level}_problem_{problem}_sample_*_kernel.py"))
    problems = list((checkout / "KernelBench" / f"level{level}").glob(f"{problem}_*.py"))
    if NO_VERDICT.search(json.dumps(said.get("metadata", {}))) or len(sources) != 1 or len(problems) != 1:
        return None
    candidate = {
        "id": f"{run.name} {problems[0].stem}",
        "language": "kernelbench",
        "source": sources[0].read_text(),
        "problem": problems[0].read_text(),
        "sizes": "small",
        "seconds": 300,
    }
    return (RIGHT if said.get("correctness") else WRONG), candidate
