"""The check that a call stays within the memory of its tensors, and writes its results in full."""

import numpy as np
import torch

from fourfold.checks.results import compare_results, describe, expected_results, named_results, storage_of
from fourfold.checks.search import Search, Subject
from fourfold.instruments.redzones import POISONS, Arena, poison_of
from fourfold.numerics.compare import Agreement
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure

# Extra calls in the same memory, which reveal results that differ between equal calls.
CALLS_IN_ONE_MEMORY = 4


def memory_is_respected(subject: Subject, search: Search) -> None:
    """Check that a call reads only the given tensors and writes only the results, in full and in memory of their own.

    The call runs twice, in memory that held different values before. An implementation that claims no determinism may
    then give different bits, within the bounds.
    """

    def body(case: Case) -> None:
        runs: list[dict[str, torch.Tensor]] = []
        for poison in POISONS:
            results, tensors = _results_in(subject, case, poison)
            owners = {storage_of(tensor): f"its input {name}" for name, tensor in tensors.items()}
            owners |= {storage_of(former): "a former result" for run in runs for former in run.values()}
            for name, result in results.items():
                if result.numel() and storage_of(result) in owners:
                    raise Failure(f"{subject}: {name} shares its memory with {owners[storage_of(result)]}", name)
            runs.append(results)
        if different := _difference(subject, *runs):
            name, index, first, second = different
            poisons = [poison_of(poison, runs[0][name].dtype) for poison in POISONS]
            if np.array_equal([first, second], poisons, equal_nan=True):
                problem = "was never written, or comes from memory that the call was not given"
            elif not subject.claims.deterministic:
                for run in runs:
                    search.saw(*compare_results(subject, run, expected_results(subject, case), tensors))
                return
            elif any(
                _difference(subject, runs[1], _results_in(subject, case, POISONS[1])[0])
                for _ in range(CALLS_IN_ONE_MEMORY)
            ):
                problem = f"is {first} or {second} in two calls alike; Claims(deterministic=False) accepts that"
            else:
                problem = f"is {first} or {second}, depending on memory that the call was not given"
            raise Failure(f"{subject}: {name}{index} {problem}\nwith {describe(tensors)}", name)
        search.saw(*(Agreement(0.0, result.numel(), 0) for result in runs[0].values()))

    search.cases(subject, "memory", body)


def _results_in(subject: Subject, case: Case, poison: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the results and the tensors of a call in memory that held `poison`."""
    with Arena(poison) as arena:
        output, gradients, tensors = subject.evaluate(case, place=arena.place)
    for trespass in arena.trespasses():
        raise Failure(f"{subject}: the call {trespass}\nwith {describe(tensors)}")
    return {name: result.detach() for name, result in named_results(output, gradients).items()}, tensors


def _difference(
    subject: Subject, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> tuple[str, list[int], float, float] | None:
    """Return the first difference between two calls' results: name, index and both values; None if there is none."""
    left, right = subject.dtype.arrays(first), subject.dtype.arrays(second)
    for name in left:
        differs = np.argwhere((left[name] != right[name]) & ~(np.isnan(left[name]) & np.isnan(right[name])))
        if len(differs):
            index = tuple(int(i) for i in differs[0])
            return name, list(index), left[name][index], right[name][index]
    return None
