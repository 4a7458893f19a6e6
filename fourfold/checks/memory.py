"""The check that a call stays within the memory of its tensors, and writes its results in full."""

import numpy as np
import torch

from fourfold.checks.results import describe, named_results, storage_of
from fourfold.checks.search import Failure, Search, Subject
from fourfold.core.arena import POISONS, Arena
from fourfold.core.case import Case
from fourfold.core.comparison import Agreement


def memory_is_respected(subject: Subject, search: Search) -> None:
    """A call reads only the given tensors and writes only the results, in full and in memory of their own."""

    def body(case: Case) -> None:
        runs: list[dict[str, torch.Tensor]] = []
        for poison in POISONS:
            with Arena(poison) as arena:
                output, gradients, tensors = subject.evaluate(case, place=arena.place)
            for trespass in arena.trespasses():
                raise Failure(f"{subject}: the call {trespass}\nwith {describe(tensors)}")
            results = named_results(output, gradients)
            lent = {storage_of(tensor): f"its input {name}" for name, tensor in tensors.items()}
            lent |= {storage_of(former): "a former result" for run in runs for former in run.values()}
            for name, result in results.items():
                if result.numel() and storage_of(result) in lent:
                    raise Failure(f"{subject}: {name} shares its memory with {lent[storage_of(result)]}")
            runs.append({name: result.detach() for name, result in results.items()})
        held = [subject.dtype.arrays(run) for run in runs]
        for name in runs[0]:
            first, second = (run[name] for run in held)
            differs = np.argwhere((first != second) & ~(np.isnan(first) & np.isnan(second)))
            if len(differs):
                at = tuple(int(i) for i in differs[0])
                why = f"is {first[at]} or {second[at]}, depending on memory that the call was not given"
                if np.isnan(first[at]) and second[at] == POISONS[1]:
                    why = "was never written, or comes from memory that the call was not given"
                raise Failure(f"{subject}: {name}{list(at)} {why}\nwith {describe(tensors)}")
        search.saw(*(Agreement(0.0, result.numel(), 0) for result in runs[0].values()))

    search.cases(subject, "memory", body)
