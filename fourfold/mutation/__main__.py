"""Make mutants of an operation's kernels and run the checks on each, on the CPU.

    python -m fourfold.mutation --op softmax --backend triton
    python -m fourfold.mutation --candidate softmax=my_kernels.py:my_softmax

The exit status is 1 if a mutant survives that `tests/known_wrong/equivalent_mutants.toml` does not list.
"""

import argparse
import collections
import contextlib
import copy
import json
import os
import pathlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
# Use one thread: a fork copies only the thread that calls it, so a pool of threads would be missing in the child.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from fourfold.checks.records import operations
from fourfold.engine.cells import CANDIDATE, Candidate, SelectionError, choose
from fourfold.mutation import known
from fourfold.mutation.mutant import Mutant
from fourfold.mutation.options import DESCRIPTION, add_options
from fourfold.mutation.sources import mutants_of_files, reachable_functions, sources
from fourfold.mutation.trial import TrialResult, Trials, Unmutated
from fourfold.numerics.dtypes import DTYPES
from fourfold.processes.family import kill_descendants
from fourfold.processes.stop import Stop

DTYPE_ORDER = ("float32", "float16", "float64", "bfloat16")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="fourfold mutate", description=DESCRIPTION)
    add_options(parser)
    options = parser.parse_args(words)
    if options.kernel:
        options.candidate = f"{options.operation}={options.kernel}"
    if bool(options.op) == bool(options.candidate):
        parser.error("either --op, or --candidate, or a kernel with --as")
    try:
        choose("--op", [options.op] if options.op else [], operations())
        choose("--dtype", options.dtype or [], DTYPES)
        options.parsed = Candidate.parse(options.candidate, operations()) if options.candidate else None
    except SelectionError as error:
        parser.error(str(error))
    return options


def mutants_of(options: argparse.Namespace, candidate: Candidate | None) -> tuple[list[Mutant], dict[str, str]]:
    """Return all mutants of the operation or the candidate, and the texts of its files."""
    if candidate:
        texts = {candidate.place: pathlib.Path(candidate.place).read_text()}
        return mutants_of_files(texts, "triton"), texts
    texts = sources(options.op, options.backend)
    of_operation = reachable_functions(options.op, options.backend, texts)
    mutants = mutants_of_files(texts, options.backend)
    return [mutant for mutant in mutants if (mutant.file, mutant.function) in of_operation], texts


def select(options: argparse.Namespace, mutants: list[Mutant]) -> list[Mutant]:
    """Return the mutants that the command line selects."""
    selected = [
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
        selected = [mutant for mutant in selected if mutant.identity in survived]
    if options.sample is not None and options.sample < len(selected):
        indices = sorted(random.Random(options.seed).sample(range(len(selected)), options.sample))
        selected = [selected[i] for i in indices]
    return selected


def try_mutants(
    trials: Trials, unmutated: Unmutated, mutants: list[Mutant], jobs: int
) -> Generator[tuple[int, TrialResult], None, None]:
    """Try the mutants in parallel. Yield the index and the outcome of each as soon as it is known."""

    def attempt(number: int, mutant: Mutant) -> tuple[int, TrialResult]:
        own_trials = copy.copy(trials)  # each thread has its own copy of the kernels
        own_trials.directory = trials.directory.parent / threading.current_thread().name
        return number, own_trials.outcome(mutant, unmutated)

    with ThreadPoolExecutor(jobs, "worker") as workers:
        try:
            for future in as_completed([workers.submit(attempt, *numbered) for numbered in enumerate(mutants)]):
                yield future.result()
        except BaseException:
            workers.shutdown(wait=False, cancel_futures=True)
            kill_descendants()
            raise


def main(words: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = arguments(words)
    with Stop() as stop:
        try:
            return run(options)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return stop.status


def run(options: argparse.Namespace) -> int:
    """Try the mutants that the command line selects. Return the exit status."""
    candidate = options.parsed
    total, texts = mutants_of(options, candidate)
    mutants = select(options, total)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line}:{mutant.column}: {mutant.operator}: {mutant.before} -> {mutant.after}")
        print(f"{len(mutants)} mutants")
        return 0
    torch.set_num_threads(1)
    operation = candidate.operation if candidate else options.op
    backend = CANDIDATE if candidate else options.backend
    start = time.perf_counter()
    dtypes = [name for name in DTYPE_ORDER if options.dtype is None or name in options.dtype]
    with tempfile.TemporaryDirectory(prefix="fourfold-mutation-") as directory:
        place = pathlib.Path(directory).resolve() / "unmutated"
        trials = Trials(operation, backend, candidate, dtypes, options.examples, place, options.quick)
        unmutated = trials.unmutated()
        print(f"{operation} {backend}: {len(mutants)} of {len(total)} mutants; as they are the kernels pass", end=" ")
        print(f"{len(trials.steps)} checks in {sum(unmutated.seconds):.0f} s", flush=True)
        outcomes: dict[int, TrialResult] = {}

        def report() -> None:
            if options.report:
                write_report(options, operation, backend, trials, unmutated, mutants, outcomes, texts, start)

        try:
            with contextlib.closing(try_mutants(trials, unmutated, mutants, options.jobs)) as results:
                for number, outcome in results:
                    outcomes[number] = outcome
                    if outcome.status == "survived":
                        print_survivor(mutants[number], outcome)
                    if len(outcomes) % 20 == 0:
                        report()
        finally:  # of an interrupted run, too
            report()
            problems = summarise(options, mutants, outcomes, texts, time.perf_counter() - start)
    return int(problems)


def print_survivor(mutant: Mutant, outcome: TrialResult) -> None:
    """Print a mutant that no check has rejected."""
    print(f"survived: {mutant.file}:{mutant.line}: {mutant.operator}: {mutant.code}", flush=True)
    print(f"    {mutant.before}  ->  {mutant.after}   ({outcome.seconds} s)", flush=True)


def summarise(
    options: argparse.Namespace,
    mutants: list[Mutant],
    outcomes: dict[int, TrialResult],
    texts: dict[str, str],
    seconds: float,
) -> bool:
    """Print the counts of the outcomes. Return whether a survivor is not listed, or the list is wrong."""
    all_entries = known.read_list(options.known) if options.known.exists() else []
    entries = [entry for entry in all_entries if entry.operation in ("", options.op)]
    statuses = {mutants[number].identity: outcome.status for number, outcome in outcomes.items()}
    # The list covers all operations: an entry may name a function that this operation does not use.
    of_files = mutants_of_files(texts, "triton" if options.candidate else options.backend)
    reviewed, problems = known.classify(entries, of_files, statuses)
    unknown = print_counts(mutants, outcomes, reviewed, seconds)
    for problem in problems:
        print(problem)
    return bool(unknown or problems)


def print_counts(
    mutants: list[Mutant], outcomes: dict[int, TrialResult], reviewed: dict[tuple, known.ReviewedMutant], seconds: float
) -> int:
    """Print the counts of the outcomes, and return the number of survivors that are not listed."""
    counts: collections.Counter[str] = collections.Counter()
    killers: collections.Counter[str] = collections.Counter()
    for number, outcome in outcomes.items():
        status = outcome.status
        entry = reviewed.get(mutants[number].identity)
        if status == "survived" and entry:
            status = entry.kind.replace("_", " ")
        counts[status] += 1
        if status == "killed":
            killers[outcome.by.partition(", case ")[0]] += 1
    print(f"\n{len(mutants)} mutants in {seconds:.0f} s: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    for name, count in killers.most_common():
        print(f"  {count:5} {name}")
    return counts["survived"]


def write_report(
    options: argparse.Namespace,
    operation: str,
    backend: str,
    trials: Trials,
    unmutated: Unmutated,
    mutants: list[Mutant],
    outcomes: dict[int, TrialResult],
    texts: dict[str, str],
    start: float,
) -> None:
    """Write all outcomes so far as JSON."""
    rows: list[dict[str, Any]] = [
        {**mutants[number].report(texts[mutants[number].file]), **vars(outcomes[number])} for number in sorted(outcomes)
    ]
    content = {
        "operation": operation,
        "backend": backend,
        "mutants": len(mutants),
        "seconds": round(time.perf_counter() - start),
        "checks": {str(step): seconds for step, seconds in zip(trials.steps, unmutated.seconds)},
        "outcomes": rows,
    }
    options.report.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    sys.exit(main())
