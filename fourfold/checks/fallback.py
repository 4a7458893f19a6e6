"""The check that kernels compute their results themselves, without torch's operators."""

from fourfold.checks.search import Search, Subject
from fourfold.instruments.operator_watch import Fallbacks
from fourfold.numerics.compare import Agreement
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure


def nothing_is_left_to_torch(subject: Subject, search: Search) -> None:
    """Check that the implementation uses torch only for memory, and computes everything itself."""

    def body(case: Case) -> None:
        fallbacks = Fallbacks()
        subject.evaluate(case, watch=fallbacks)
        if fallbacks.operators:
            raise Failure(f"{subject}: the call computes with torch: {', '.join(fallbacks.operators)}")
        search.saw(Agreement(0.0, case.grad_output.size, 0))

    search.cases(subject, "fallback", body)
