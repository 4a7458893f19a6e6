"""The check that the output agrees with the oracle's."""

from fourfold.backends.tuning import Misfit
from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.results import compare_results, inputs_are_unchanged
from fourfold.checks.search import Search, Subject
from fourfold.operations.case import Case
from fourfold.operations.record import reference


@allow_storage_accuracy
def forward_agrees(subject: Subject, search: Search) -> None:
    """Check that the output agrees with the oracle's within its running error, and that the inputs do not change."""

    def body(case: Case) -> None:
        try:
            output, _, tensors = subject.evaluate(case, gradients=False)
        except Misfit:  # the check of the default configuration has the case
            return
        expected = reference(subject.operation, case, subject.dtype)
        agreements = compare_results(subject, {"output": output}, {"output": expected}, tensors)
        inputs_are_unchanged(subject, case, tensors)
        search.saw(*agreements)

    search.takes_cotangent = False
    search.cases(subject, "forward", body, large=True, dear=True)
