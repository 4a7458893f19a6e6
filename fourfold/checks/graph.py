"""The check that gradients depend neither on a call's place in autograd's graph nor on the kind of backward pass."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.results import compare_results, expected_gradients
from fourfold.checks.search import Search, Subject, need
from fourfold.instruments.evaluation import blame_implementation, gradients_of
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure

# The operation between a leaf and the call, by the phrase for messages.
BEFORE: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of a leaf": lambda leaf: leaf,
    "of the result of another operation": lambda leaf: leaf * 1,
    "of a view": lambda leaf: leaf.view_as(leaf),
}
Pass = Callable[[torch.Tensor, list[torch.Tensor], torch.Tensor], tuple[torch.Tensor, ...]]


def _thread_gradients(
    output: torch.Tensor, leaves: list[torch.Tensor], grad_output: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(gradients_of, output, leaves, grad_output).result()


def _accumulate_gradients(
    output: torch.Tensor, leaves: list[torch.Tensor], grad_output: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradients that `backward` accumulates in the leaves' `grad`."""
    with blame_implementation():
        output.backward(grad_output)
    return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)


@allow_storage_accuracy
def place_in_the_graph_does_not_matter(subject: Subject, search: Search) -> None:
    """Check the gradients of leaves, results and views, by `autograd.grad`, by `backward` and in another thread."""
    subject.needs_gradients()
    variants: list[tuple[str, str, Pass]] = [
        ("of the result of another operation", "", gradients_of),
        ("of a view", "", gradients_of),
        ("of a leaf", " in another thread", _thread_gradients),
        ("of a leaf", " by backward()", _accumulate_gradients),
    ]

    def body(case: Case) -> None:
        names = subject.operation.differentiable_in(case)
        need(names)
        expected, agreements = expected_gradients(subject, case), []
        for source, suffix, differentiate in variants:
            leaves = case.tensors(subject.dtype, subject.device)
            for name in names:
                leaves[name].requires_grad_()
            arguments = {name: BEFORE[source](leaf) if name in names else leaf for name, leaf in leaves.items()}
            output = subject.call(**arguments, **case.parameters)
            grad_output = case.tensor("grad_output", subject.dtype, subject.device)
            gradients = differentiate(output, [leaves[name] for name in names], grad_output)
            results = {name: gradient.detach() for name, gradient in zip(expected, gradients)}
            agreements += compare_results(subject, results, expected, arguments, f"of a call {source}{suffix}, ")
            for name in names if differentiate is not _accumulate_gradients else ():
                if leaves[name].grad is not None:
                    raise Failure(f"{subject}: torch.autograd.grad{suffix} has written into the grad of {name}")
        search.saw(*agreements)

    search.cases(subject, "graph", body, sparse=True, extra=subject.small_example())
