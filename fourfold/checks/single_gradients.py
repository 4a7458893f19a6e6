"""The check that the gradient of one input alone, or of some of them, agrees with the oracle's."""

from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.results import compare_results, expected_gradients, named_gradients
from fourfold.checks.search import Search, Subject
from fourfold.instruments.evaluation import gradients_of
from fourfold.numerics.compare import Agreement
from fourfold.operations.case import Case


@allow_storage_accuracy
def single_gradients_agree(subject: Subject, search: Search) -> None:
    """Check each input's gradient computed alone and, for three inputs or more, the gradients of all inputs but one.

    They need not have the same bits as the gradients of all inputs. A kernel that skips half of the work is compiled
    again, and the compiler may fuse other multiplications and additions.
    """
    subject.needs_gradients()

    def body(case: Case) -> None:
        names = subject.operation.differentiable_in(case)
        expected = expected_gradients(subject, case)
        subsets: list[tuple[str, ...]] = [(name,) for name in names]
        if len(names) > 2:
            # All but one, each omitted in turn, as when the input is data and only parameters are trained.
            subsets.append(tuple(name for name in names if name != names[search.ran % len(names)]))
        agreements: list[Agreement] = []
        for inputs in subsets:
            tensors = case.tensors(subject.dtype, subject.device)
            for name in inputs:
                tensors[name].requires_grad_()
            output = subject.call(**tensors, **case.parameters)
            grad_output = case.tensor("grad_output", subject.dtype, subject.device)
            gradients = gradients_of(output, [tensors[name] for name in inputs], grad_output)
            results = named_gradients(dict(zip(inputs, gradients)))
            context = f"for {' and '.join(inputs)} alone, "
            agreements += compare_results(subject, results, expected, tensors, context)
        search.saw(*agreements)

    search.cases(subject, "single gradients", body)
