"""The check that the gradient of one input alone, or of some of them, agrees with the oracle's."""

from fourfold.checks.grades import graded
from fourfold.checks.results import compare_results, expected_gradients
from fourfold.checks.search import Search, Subject
from fourfold.instruments.evaluation import gradients_of
from fourfold.numerics.compare import Agreement
from fourfold.operations.case import Case


@graded
def single_gradients_agree(subject: Subject, search: Search) -> None:
    """The gradient of each input alone agrees with the oracle's; of three inputs, also the gradients of two of them.

    It need not equal the gradient taken together with the others bit for bit. A kernel that leaves out half of the
    work is compiled anew, and the compiler may fuse other multiplications and additions.
    """
    subject.needs_gradients()

    def body(case: Case) -> None:
        names = subject.operation.differentiable_in(case)
        expected = expected_gradients(subject, case)
        some: list[tuple[str, ...]] = [(name,) for name in names]
        if len(names) > 2:
            # All but one, each left out in turn, as where the input is data and only parameters are trained.
            some.append(tuple(name for name in names if name != names[search.ran % len(names)]))
        agreements: list[Agreement] = []
        for wanted in some:
            tensors = case.tensors(subject.dtype, subject.device)
            for name in wanted:
                tensors[name].requires_grad_()
            output = subject.call(**tensors, **case.parameters)
            grad_output = case.tensor("grad_output", subject.dtype, subject.device)
            gradients = gradients_of(output, [tensors[name] for name in wanted], grad_output)
            when = f"for {' and '.join(wanted)} alone, gradient of "
            agreements += compare_results(subject, dict(zip(wanted, gradients)), expected, tensors, when)
        search.saw(*agreements)

    search.cases(subject, "single gradients", body)
