"""The check that the backward pass uses the values at the call, despite later writes into its tensors."""

import torch

from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.results import compare_results, expected_gradients
from fourfold.checks.search import Search, Subject
from fourfold.compat import torch_internals
from fourfold.instruments.evaluation import gradients_of
from fourfold.numerics.compare import Agreement
from fourfold.operations.case import Case


@allow_storage_accuracy
def backward_is_of_the_call(subject: Subject, search: Search) -> None:
    """Check that a write to an input or output before the backward pass raises, or leaves the gradients right."""
    subject.needs_gradients()

    def body(case: Case) -> None:
        expected = expected_gradients(subject, case)
        agreements = [Agreement(0.0, 1, 0)]
        names = subject.operation.differentiable_in(case)
        for target in (*names, "the output"):
            tensors = case.tensors(subject.dtype, subject.device)
            leaves = [tensors[name].requires_grad_() for name in names]
            output = subject.call(**tensors, **case.parameters)
            with torch.no_grad():
                (output if target == "the output" else tensors[target]).mul_(-2)
            grad_output = case.tensor("grad_output", subject.dtype, subject.device)
            try:
                gradients = gradients_of(output, leaves, grad_output)
            except RuntimeError as error:
                if torch_internals.says_written_into(error):
                    continue
                raise
            context = f"after {target} was written into, "
            agreements += compare_results(subject, dict(zip(expected, gradients)), expected, tensors, context)
        search.saw(*agreements)

    search.for_all(f"backward is of the call {subject}", subject.operation.smooth(subject.dtype), body)
