"""Write labelled candidates, or compare the verdicts of grading with the labels.

python -m tests.grading write candidates.jsonl --count 1000
python -m tests.grading public candidates.jsonl --checkout KernelBench --on-cpu --count 100
fourfold grade candidates.jsonl --out results.jsonl
python -m tests.grading check candidates.jsonl results.jsonl
"""

import argparse
import json
import math
import random
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import labelled, public
from .labelled import RIGHT, Labelled


def write(file: Path, candidates: Sequence[Labelled]) -> None:
    """Write the candidates, one in each line, and the labels to a separate file that no candidate sees."""
    file.write_text("".join(json.dumps(candidate) + "\n" for _, candidate in candidates))
    _labels(file).write_text(json.dumps({candidate["id"]: label for label, candidate in candidates}, indent=1))
    print(f"{len(candidates)} candidates, {sum(label == RIGHT for label, _ in candidates)} of them right: {file}")


def _labels(file: Path) -> Path:
    return file.with_suffix(".labels.json")


def check(file: Path, results: Path) -> int:
    """Print how often grading agrees with the labels; return how many disagree or have no verdict."""
    labels = json.loads(_labels(file).read_text())
    graded = {row["id"]: row for row in map(json.loads, results.read_text().splitlines())}
    missing = labels.keys() - graded.keys()
    judged = [name for name in labels if name in graded]
    known = [name for name in judged if labels[name] != public.UNKNOWN]
    off = {name for name in known if (graded[name]["kind"] == RIGHT) != (labels[name] == RIGHT)}
    reported = {name for name in off if labels[name] != RIGHT and _is_reported(name, graded[name])}
    for name in sorted(off - reported):
        print(f"{name}: labelled {labels[name]}, graded {graded[name]['kind']}")
    kinds = dict(Counter(row["kind"] for row in graded.values()))
    print(f"{len(judged)} of {len(labels)} graded, {len(missing)} missing: {kinds}")
    for label, what in ((RIGHT, "right ones rejected"), ("wrong", "wrong ones accepted")):
        of_label = [name for name in judged if labels[name] == label and name not in reported]
        bad = sum(name in off for name in of_label)
        low, high = wilson(bad, len(of_label))
        print(f"{what}: {bad} of {len(of_label)}, {low:.2%} to {high:.2%} with 95% confidence")
    for kind in sorted({kind_of(name) for name in known}):
        of_kind = [name for name in known if kind_of(name) == kind]
        agreed = sum(name not in off for name in of_kind)
        low, high = wilson(agreed, len(of_kind))
        verdicts = dict(Counter(graded[name]["kind"] for name in of_kind))
        print(f"{kind}: {agreed} of {len(of_kind)} as labelled, {low:.1%} to {high:.1%}: {verdicts}")
    print(f"accepted, but the verdict names refused cases, or the mistake's line as never executed: {len(reported)}")
    seconds = sorted(row["seconds"] for row in graded.values() if not row.get("same_as"))
    if len(seconds) > 1:
        late = seconds[int(0.95 * (len(seconds) - 1))]
        print(f"seconds: median {statistics.median(seconds):.1f}, 95% within {late:.1f}")
    return len(off - reported) + len(missing)


def kind_of(name: str) -> str:
    """Return the kind of a labelled candidate: the words of its name before its operation or its file."""
    return next((kind for kind in labelled.DEADLY if name.startswith(kind)), name.partition(" ")[0])


def _is_reported(name: str, graded: dict[str, Any]) -> bool:
    """Return whether an accepting verdict says that the kernel refuses cases, or that a mutant's line never ran."""
    if graded.get("refused_share"):
        return True
    found = re.search(r"line (\d+)$", name)
    ranges = [tuple(map(int, each["lines"].split("-"))) for each in graded.get("never_executed") or ()]
    return found is not None and any(of[0] <= int(found[1]) <= of[-1] for of in ranges)


def wilson(found: int, of: int) -> tuple[float, float]:
    """Return the 95% interval of a share (E. B. Wilson, Probable inference, 1927)."""
    if not of:
        return 0.0, 1.0
    z, share = 1.96, found / of
    middle, reach = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return tuple(max(0.0, end / (1 + z * z / of)) for end in (middle - reach, middle + reach))  # type: ignore[return-value]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.grading", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("candidates", type=Path)
    writing.add_argument("--count", type=int, default=1000)
    writing.add_argument("--seed", type=int, default=0)
    writing.add_argument(
        "--operations", default=",".join(labelled.OPERATIONS), help="the operations of the kernels, separated by commas"
    )
    taking = commands.add_parser("public")
    taking.add_argument("candidates", type=Path)
    taking.add_argument("--checkout", type=Path, required=True, help="of a source that tests/grading/public.py names")
    taking.add_argument("--on-cpu", action="store_true", help="only those that run without a GPU, made to do so")
    taking.add_argument("--count", type=int, help="so many of them, drawn by --seed; all unless given")
    taking.add_argument("--seed", type=int, default=0)
    checking = commands.add_parser("check")
    checking.add_argument("candidates", type=Path)
    checking.add_argument("results", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        write(given.candidates, labelled.candidates(given.count, given.seed, given.operations.split(",")))
        return 0
    if given.command == "public":
        of_source = public.candidates(given.checkout)
        found = list(public.on_cpu(of_source) if given.on_cpu else of_source)
        drawn = random.Random(given.seed).sample(found, min(given.count or len(found), len(found)))
        write(given.candidates, drawn if given.count else found)
        return 0
    return int(check(given.candidates, given.results) > 0)


if __name__ == "__main__":
    sys.exit(main())
