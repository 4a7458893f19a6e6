"""The check that the gradients, all computed together, agree with the oracle's."""

from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.results import compare_results, expected_results, inputs_are_unchanged, named_results
from fourfold.checks.search import Search, Subject
from fourfold.operations.case import Case


@allow_storage_accuracy
def backward_agrees(subject: Subject, search: Search) -> None:
    """Check that the gradients under a random cotangent, and the output, agree with the oracle's.

    The tolerance is the oracle's running error.

    The output is compared here, too, because another kernel may compute it when gradients are required.
    """
    subject.needs_gradients()

    def body(case: Case) -> None:
        output, gradients, tensors = subject.evaluate(case)
        agreements = compare_results(
            subject,
            named_results(output, gradients),
            expected_results(subject, case),
            tensors,
            context="where gradients are wanted, ",
        )
        inputs_are_unchanged(subject, case, tensors)
        search.saw(*agreements)

    search.cases(subject, "backward", body, large=True)
