"""The check that an implementation's own results stand in the relations that a law of its operation names."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch

from properties.case import Case
from properties.comparison import Agreement, Disagreement, compare, expectation
from properties.dtypes import DType
from properties.operation import Evaluate, Law, Result, evaluate_tensors, reference, reference_gradients
from properties.running_error import Bounded
from properties.search import Failure, Search, Subject

# Of a search for more, as on a GPU by night, nothing is kept for the next law.
MOST_KEPT = 100


class Kept:
    """The cases that a subject's laws are put on, one law after another, and what the subject gave for them."""

    def __init__(self) -> None:
        self.cases: dict[bytes, Case] = {}
        self.results: dict[Case, Result] = {}

    def like(self, case: Case) -> Case:
        """The one that a former law was put on, if it was like this one in everything; else this one."""
        arrays = {**case.inputs, "grad_output": case.grad_output}
        digest = hashlib.sha256(repr((case.parameters, case.layouts)).encode())
        for name, array in arrays.items():
            digest.update(repr((name, array.dtype.name, array.shape)).encode())
            digest.update(array.tobytes())
        return self.cases.setdefault(digest.digest(), case)


@functools.lru_cache(maxsize=1)
def _kept(subject: str, implementation: Callable[..., torch.Tensor]) -> Kept:
    return Kept()


def law_holds(law: Law, subject: Subject, search: Search) -> None:
    """One law of the operation, on the implementation's own results.

    All laws of a subject are put on the same cases, so that what it gives for them is asked for once.
    """
    kept = _kept(str(subject), subject.implementation) if search.keeps and search.examples <= MOST_KEPT else None
    with_gradients = False  # whether the law has asked for them: then one call gives both

    def evaluate(case: Case, operation: str | None = None) -> Result:
        record, implementation = subject.operation, subject.implementation
        if operation is not None:
            record, implementation = subject.sibling(operation)
        elif kept is not None and case in kept.results:
            return kept.results[case]

        @functools.cache
        def results(gradients: bool) -> Mapping[str, Bounded]:
            output, found, _ = evaluate_tensors(implementation, record, case, subject.dtype, subject.device, gradients)
            expected = {"output": reference(record, case, subject.dtype)}
            if gradients:
                expected |= reference_gradients(record, case, subject.dtype)
            return {
                name: Bounded(array, expectation(expected[name], subject.dtype).error, subject.dtype.arithmetic)
                for name, array in subject.dtype.arrays({"output": output, **found}).items()
            }

        def output() -> Bounded:
            return results(with_gradients)["output"]

        def gradients() -> Mapping[str, Bounded]:
            nonlocal with_gradients
            subject.needs_gradients()
            with_gradients = True
            return {name: of for name, of in results(True).items() if name != "output"}

        return Result(output, gradients)

    def body(case: Case) -> None:
        if kept is not None:
            case = kept.like(case)
            kept.results[case] = evaluate(case)
        try:
            search.saw(*hold(law, evaluate, case, subject.dtype))
        except Disagreement as disagreement:
            raise Failure(f"{subject}: {law.__name__}: {disagreement}") from None

    # Laws say for themselves of what numbers they speak, and their strategies hold those.
    # Of the named examples the oracle says more than a law can. Where calls are dear, those of one dtype will do.
    named = subject.device == "cuda" or subject.dtype.name == "float32"
    search.cases(subject, law.__name__, body, special=False, named=named, alike="laws")


def hold(law: Law, evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Agreement]:
    """Compare both sides of each relation of a law, within the sum of their bounds."""
    for relation in law(evaluate, case, dtype):
        within = Bounded(relation.expected.value, relation.actual.error + relation.expected.error, dtype.arithmetic)
        yield compare(relation.actual.value, within, dtype, "left side")
