"""Mutants of an operation's kernels, and which of them the checks reject, on the CPU.

    python -m properties.mutation --op softmax --backend triton
    python -m properties.mutation --candidate softmax=my_kernels.py:my_softmax

Exits with 1 where a mutant survives that `tests/known_wrong/equivalent_mutants.toml` does not know.
"""

import argparse
import collections
import json
import multiprocessing
import os
import pathlib
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
# What is forked has no threads, which would stay behind.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from properties.cells import CANDIDATE, Candidate
from properties.dtypes import DTYPES
from properties.mutation import known
from properties.mutation.cuda_mutants import cuda_functions, cuda_mutants
from properties.mutation.mutant import Mutant
from properties.mutation.trial import PACKAGE, Baseline, Outcome, Trials
from properties.mutation.triton_mutants import triton_functions, triton_mutants
from properties.operation import operations

EQUIVALENT = PACKAGE.parent / "tests" / "known_wrong" / "equivalent_mutants.toml"
DTYPE_ORDER = ("float32", "float16", "float64", "bfloat16")
MAKERS = {"triton": triton_mutants, "cuda": cuda_mutants}
FUNCTIONS = {"triton": triton_functions, "cuda": cuda_functions}
SUFFIXES = {"triton": (".py",), "cuda": (".cu", ".cuh")}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m properties.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("--op", choices=sorted(operations()), help="the operation")
    parser.add_argument("--backend", choices=sorted(MAKERS), default="triton")
    parser.add_argument("--candidate", metavar="OP=FILE:FUNCTION", help="Triton kernels in a file of yours instead")
    parser.add_argument("--file", action="append", help="only mutants of this file of impls/ (repeatable)")
    parser.add_argument("--function", action="append", help="only mutants of this function (repeatable)")
    parser.add_argument("--not-operator", action="append", default=[], help="no mutants of this kind (repeatable)")
    parser.add_argument("--operator", action="append", help="only mutants of this kind (repeatable)")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="only this dtype (repeatable)")
    parser.add_argument("--examples", type=int, default=25, help="generated cases of each dtype")
    parser.add_argument("--again", type=pathlib.Path, metavar="REPORT", help="only those that survived in this report")
    parser.add_argument("--sample", type=int, help="as many mutants, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at a time")
    parser.add_argument("--quick", action="store_true", help="only forward, backward and memory; then --again the rest")
    parser.add_argument("--report", type=pathlib.Path, help="where to write everything, as JSON")
    parser.add_argument("--known", type=pathlib.Path, default=EQUIVALENT, help="the list of equivalent mutants")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    options = parser.parse_args(given)
    if bool(options.op) == bool(options.candidate):
        parser.error("either --op or --candidate")
    return options


def sources(operation: str, backend: str) -> dict[str, str]:
    """The text of the files, of those that there may be mutants of, that belong to an operation, or to all.

    Those that belong to several lie beside their folders, and are named in what uses them.
    """
    suffixes = SUFFIXES[backend]
    own = {path: path.read_text() for path in sorted((PACKAGE / operation).iterdir()) if path.suffix in suffixes}
    shared = {path: path.read_text() for path in sorted(PACKAGE.iterdir()) if path.suffix in suffixes}
    used = {path: text for path, text in shared.items() if any(path.stem in other for other in own.values())}
    return {
        str(path.relative_to(PACKAGE)): text
        for path, text in {**own, **used}.items()
        if backend == "cuda" or "@triton.jit" in text
    }


def reached(operation: str, backend: str, texts: dict[str, str]) -> set[tuple[str, str]]:
    """File and name of the functions that an operation's own files name, directly or through others that they name.

    What else stands in files that belong to several operations is none of this one's.
    """
    own = {file for file in texts if pathlib.PurePath(file).parts[0] == operation}
    words = {word for file in own for word in re.findall(r"\w+", texts[file])}
    found: set[tuple[str, str]] = set()
    rest = [(file, *function) for file, text in texts.items() for function in FUNCTIONS[backend](text)]
    while True:
        # A method needs its struct; an operator is used without its name.
        new = [
            (file, name, struct, body)
            for file, name, struct, body in rest
            if file in own or ((name in words or not name.isidentifier()) and (not struct or struct in words))
        ]
        if not new:
            return found
        found |= {(file, name) for file, name, _, _ in new}
        words |= {word for *_, body in new for word in re.findall(r"\w+", body)}
        rest = [function for function in rest if function not in new]


def mutants_of(options: argparse.Namespace, candidate: Candidate | None) -> tuple[list[Mutant], dict[str, str]]:
    """All mutants, and the files' texts."""
    if candidate:
        texts = {candidate.place: pathlib.Path(candidate.place).read_text()}
        return triton_mutants(candidate.place, texts[candidate.place]), texts
    texts = sources(options.op, options.backend)
    of_operation = reached(options.op, options.backend, texts)
    every = [mutant for file, text in texts.items() for mutant in MAKERS[options.backend](file, text)]
    return [mutant for mutant in every if (mutant.file, mutant.function) in of_operation], texts


def chosen(options: argparse.Namespace, mutants: list[Mutant]) -> list[Mutant]:
    """Those that the command line asks for."""
    wanted = [
        mutant
        for mutant in mutants
        if (options.file is None or mutant.file in options.file)
        and (options.function is None or mutant.function in options.function)
        and (options.operator is None or mutant.operator in options.operator)
        and mutant.operator not in options.not_operator
    ]
    if options.again is not None:
        rows = json.loads(options.again.read_text())["outcomes"]
        survived = {tuple(row[name] for name in known.FIELDS) for row in rows if row["status"] == "survived"}
        wanted = [mutant for mutant in wanted if mutant.identity in survived]
    if options.sample is not None and options.sample < len(wanted):
        taken = sorted(random.Random(options.seed).sample(range(len(wanted)), options.sample))
        wanted = [wanted[i] for i in taken]
    return wanted


_trials: Trials
_baseline: Baseline


def _try(numbered: tuple[int, Mutant]) -> tuple[int, Outcome]:
    # Each worker has a copy of the kernels for itself.
    _trials.directory = _trials.directory.parent / f"worker_{os.getpid()}"
    number, mutant = numbered
    return number, _trials.outcome(mutant, _baseline)


def tried(trials: Trials, baseline: Baseline, mutants: list[Mutant], jobs: int) -> Iterator[tuple[int, Outcome]]:
    """The outcome of each mutant, by its place in the list, as they come."""
    global _trials, _baseline
    _trials, _baseline = trials, baseline
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_try, enumerate(mutants))


def main(given: list[str] | None = None) -> int:
    """Run the command; gives its exit status."""
    options = arguments(given)
    candidate = Candidate.parse(options.candidate, operations()) if options.candidate else None
    operation = candidate.operation if candidate else options.op
    backend = CANDIDATE if candidate else options.backend
    every, texts = mutants_of(options, candidate)
    mutants = chosen(options, every)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line}:{mutant.column}: {mutant.operator}: {mutant.before} -> {mutant.after}")
        print(f"{len(mutants)} mutants")
        return 0
    torch.set_num_threads(1)
    started = time.perf_counter()
    dtypes = [name for name in DTYPE_ORDER if options.dtype is None or name in options.dtype]
    with tempfile.TemporaryDirectory(prefix="fourfold-mutation-") as directory:
        place = pathlib.Path(directory).resolve() / "baseline"
        trials = Trials(operation, backend, candidate, dtypes, options.examples, place, options.quick)
        baseline = trials.baseline()
        print(f"{operation} {backend}: {len(mutants)} of {len(every)} mutants; as they are the kernels pass", end=" ")
        print(f"{len(trials.steps)} checks in {sum(baseline.seconds):.0f} s", flush=True)
        outcomes: dict[int, Outcome] = {}
        for number, outcome in tried(trials, baseline, mutants, options.jobs):
            outcomes[number] = outcome
            mutant = mutants[number]
            if outcome.status == "survived":
                print(f"survived: {mutant.file}:{mutant.line}: {mutant.operator}: {mutant.code}", flush=True)
                print(f"    {mutant.before}  ->  {mutant.after}   ({outcome.seconds} s)", flush=True)
            if options.report and (len(outcomes) % 20 == 0 or len(outcomes) == len(mutants)):
                write_report(options, operation, backend, trials, baseline, mutants, outcomes, texts, started)
    entries = known.read(options.known) if options.known.exists() else []
    statuses = {mutants[number].identity: outcome.status for number, outcome in outcomes.items()}
    listed, problems = known.classified(entries, every, statuses)
    unknown = summarise(mutants, outcomes, listed, time.perf_counter() - started)
    for problem in problems:
        print(problem)
    return int(bool(unknown or problems))


def summarise(
    mutants: list[Mutant], outcomes: dict[int, Outcome], listed: dict[tuple, known.Known], seconds: float
) -> int:
    """Print what came of all; gives the number of those that survived and are not listed."""
    counts: collections.Counter[str] = collections.Counter()
    by: collections.Counter[str] = collections.Counter()
    for number, outcome in outcomes.items():
        status = outcome.status
        entry = listed.get(mutants[number].identity)
        if status == "survived" and entry:
            status = entry.kind.replace("_", " ")
        counts[status] += 1
        if status == "killed":
            by[outcome.by.partition(", case ")[0]] += 1
    print(f"\n{len(mutants)} mutants in {seconds:.0f} s: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    for name, count in by.most_common():
        print(f"  {count:5} {name}")
    return counts["survived"]


def write_report(
    options: argparse.Namespace,
    operation: str,
    backend: str,
    trials: Trials,
    baseline: Baseline,
    mutants: list[Mutant],
    outcomes: dict[int, Outcome],
    texts: dict[str, str],
    started: float,
) -> None:
    """Write everything that is known so far."""
    rows: list[dict[str, Any]] = [
        {**mutants[number].described(texts[mutants[number].file]), **vars(outcomes[number])}
        for number in sorted(outcomes)
    ]
    content = {
        "operation": operation,
        "backend": backend,
        "mutants": len(mutants),
        "seconds": round(time.perf_counter() - started),
        "checks": {str(step): seconds for step, seconds in zip(trials.steps, baseline.seconds)},
        "outcomes": rows,
    }
    options.report.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    sys.exit(main())
