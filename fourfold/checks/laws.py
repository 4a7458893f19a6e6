"""The check that an implementation's own results satisfy a law of its operation."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.search import OUTPUT, Search, Subject
from fourfold.instruments.evaluation import evaluate_tensors
from fourfold.numerics.bounded import DOCUMENTED, Bounded
from fourfold.numerics.compare import Agreement, Disagreement, compare, expectation
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case, RecentCases
from fourfold.operations.outcomes import Failure
from fourfold.operations.record import Evaluate, Law, Operation, Result, reference, reference_gradients

# A search for more examples, a nightly one on a GPU for example, keeps no results for the next law.
MOST_KEPT = 100
# The most elements of a named example for laws on a CPU. A law may set its own limit, `most_named`.
MOST_NAMED = 10_000
# The name of a relation's result in messages.
LEFT_SIDE = "left side"


class LawCases:
    """The cases for all laws of a subject, and the subject's results for them."""

    def __init__(self) -> None:
        self.cases = RecentCases(math.inf)
        self.results: dict[Case, Result] = {}


@functools.lru_cache(maxsize=1)
def _law_cases(subject: str, implementation: Callable[..., torch.Tensor]) -> LawCases:
    return LawCases()


def law_holds(law: Law, subject: Subject, search: Search) -> None:
    """Check that the implementation's own results satisfy one law of the operation.

    All laws of a subject are checked on the same cases, so that each result is computed only once.
    """
    allow_storage_accuracy(functools.partial(_law_holds, law))(subject, search)


class _Evaluation:
    """The function by which a law evaluates a subject. It computes each result once per evaluation.

    Args:
        law: the law, for messages.
        subject: the implementation to verify.
        shared: the cases and results of earlier laws; None to keep none.
    """

    def __init__(self, law: Law, subject: Subject, shared: LawCases | None) -> None:
        self.law, self.subject, self.shared = law, subject, shared
        self.with_gradients = False  # whether the law has used gradients; one call then computes both

    def __call__(self, case: Case, operation: str | None = None, documented: bool = False) -> Result:
        """Return the results of a case: see `Evaluate`."""
        subject = self.subject
        record, implementation = subject.operation, subject.implementation
        dtype = subject.dtype.with_contract(DOCUMENTED) if documented else subject.dtype
        if operation is not None:
            record, implementation = subject.sibling(operation)
        elif self.shared is not None and case in self.shared.results and not documented:
            return self.shared.results[case]

        @functools.cache
        def results(gradients: bool) -> Mapping[str, Bounded]:
            return self._results(record, implementation, case, dtype, gradients)

        def output() -> Bounded:
            return results(self.with_gradients)[OUTPUT]

        def gradients() -> Mapping[str, Bounded]:
            subject.needs_gradients()
            self.with_gradients = True
            return {name: result for name, result in results(True).items() if name != OUTPUT}

        return Result(output, gradients)

    def _results(
        self, record: Operation, implementation: Callable[..., torch.Tensor], case: Case, dtype: DType, gradients: bool
    ) -> Mapping[str, Bounded]:
        """Return the output and, if `gradients`, the gradients of a call, by name, with the reference's bounds."""
        subject = self.subject
        output, by_input, _ = evaluate_tensors(implementation, record, case, subject.dtype, subject.device, gradients)
        expected = {OUTPUT: reference(record, case, dtype)}
        if gradients:
            expected |= reference_gradients(record, case, dtype)
        arrays = subject.dtype.arrays({OUTPUT: output, **by_input})
        for name, array in arrays.items():
            bounded = expected[name]
            if array.ndim != len(bounded.shape) or (array.shape != bounded.shape and not bounded.any_length):
                shapes = f"shape {list(array.shape)}, expected {list(bounded.shape)}"
                raise Failure(f"{subject}: {self.law.__name__}: {name} has {shapes}", name)
        dtypes = {OUTPUT: record.result_dtype(dtype)}
        return {
            name: Bounded(array, _bound(expected[name], array, dtypes.get(name, dtype)), dtype.arithmetic)
            for name, array in arrays.items()
        }


def _bound(expected: Bounded, array: np.ndarray, dtype: DType) -> np.ndarray:
    """Return each element's bound: zero in a result of any length, whose elements are selected and not rounded."""
    return np.zeros(array.shape) if expected.any_length else expectation(expected, dtype).error


def _law_holds(law: Law, subject: Subject, search: Search) -> None:
    shared = _law_cases(str(subject), subject.implementation) if search.keeps and search.examples <= MOST_KEPT else None
    evaluate = _Evaluation(law, subject, shared)

    def body(case: Case) -> None:
        if shared is not None:
            case = shared.cases.same(case)
            shared.results[case] = evaluate(case)
        try:
            search.saw(*hold(law, evaluate, case, subject.dtype, exact=not subject.foreign))
        except Disagreement as disagreement:
            raise Failure(f"{subject}: {law.__name__}: {disagreement}", LEFT_SIDE) from None

    # Add no special values: each law restricts itself to numbers for which it holds, which the strategy draws.
    # The oracle checks named examples more strictly than a law can. If calls are slow, small ones in one dtype suffice.
    # Layouts are the oracle's and not a law's: those of generated cases suffice.
    named = subject.device == "cuda" or subject.dtype.name == "float32"
    limit = math.inf if subject.device == "cuda" else getattr(law, "most_named", MOST_NAMED)
    search.cases(
        subject, law.__name__, body, special=False, named=named, stream="laws", most_named=limit, laid_out=False
    )


def hold(law: Law, evaluate: Evaluate, case: Case, dtype: DType, exact: bool = True) -> Iterator[Agreement]:
    """Compare both sides of each relation of a law, within the sum of their bounds.

    Args:
        law: the law.
        evaluate: computes the results.
        case: the case.
        dtype: the dtype of the results.
        exact: whether exact relations hold without any error. Another order of the same steps may round otherwise.
    """
    for relation in law(evaluate, case, dtype):
        actual, expected = relation.actual, relation.expected
        without_error = relation.exact and exact
        error = np.zeros(expected.shape) if without_error else actual.error + expected.error
        # Either side may overflow, and be compared with a multiple that the dtype cannot hold.
        swapped = np.isinf(expected.value) & np.isfinite(actual.value)
        left, right = (
            np.where(swapped, other.value, side.value) for side, other in ((actual, expected), (expected, actual))
        )
        yield compare(left, Bounded(right, error, dtype.arithmetic), dtype, LEFT_SIDE)
