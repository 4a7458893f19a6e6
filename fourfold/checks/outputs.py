"""The checks of operations with several outputs: each output is an operation of its own, verified alone.

The gradients are checked under a cotangent for one output and zeros for the others, and, once, under random cotangents
for all outputs together.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fourfold.candidates.integrity.escapes import held
from fourfold.checks.results import describe
from fourfold.checks.search import Search, Subject
from fourfold.instruments.evaluation import gradients_of
from fourfold.instruments.tampering import random_state_kept
from fourfold.numerics.compare import Agreement
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.not_reached import NotReached
from fourfold.operations.outcomes import Failure
from fourfold.operations.outputs import alone, in_a_row, outputs_of
from fourfold.operations.record import Operation
from fourfold.operations.refusals import OutOfTime

Run = Callable[[Subject, Search], None]


def of_one(run: Run, name: str) -> Run:
    """A check of one of the outputs of a subject that has several."""

    @functools.wraps(run)
    def checked(subject: Subject, search: Search) -> None:
        run(of_output(subject, name), search)

    return checked


def of_output(subject: Subject, name: str) -> Subject:
    """A subject that has several outputs as one that has this output alone."""
    names = tuple(subject.operation.outputs)
    implementation = _kept(alone, subject.implementation, names, names.index(name))
    of = subject.operation.outputs[name]
    # Its large cases too have a cotangent of this output alone.
    large = None if subject.large is None else replace(subject.large, operation=of)
    subject = replace(subject, operation=of, implementation=implementation, large=large)
    if subject.differentiable and subject.operation.differentiable:
        has = requires_gradient(implementation, subject.operation, subject.dtype, subject.device)
        subject = replace(subject, differentiable=has)
    return subject


def outputs_fit(subject: Subject, search: Search) -> None:
    """The outputs and gradients of one call fit one another: the record says what is not admissible of them together.

    What each must be for itself is another check's.
    """
    operation, names, dtype = subject.operation, tuple(subject.operation.outputs), subject.dtype
    admissible = operation.admissible
    assert admissible is not None

    def body(case: Case) -> None:
        tensors = case.tensors(dtype, subject.device)
        wanted = operation.differentiable_in(case) if subject.differentiable else ()
        for name in wanted:
            tensors[name].requires_grad_()
        found = dict(zip(names, outputs_of(subject.call(**tensors, **case.parameters), names)))
        results = {name: output.detach() for name, output in found.items()}
        if wanted:
            joined = in_a_row(lambda: tuple(found.values()), names, operation.joined, dtype.torch)()
            cotangent = case.tensor("grad_output", dtype, subject.device)
            gradients = gradients_of(joined, [tensors[name] for name in wanted], cotangent)
            results |= {f"gradient of {name}": gradient for name, gradient in zip(wanted, gradients)}
        problem = admissible(case, dtype.arrays(results))
        if problem is not None:
            raise Failure(f"{subject}: {problem}\nwith {describe(tensors)}")
        search.saw(*(Agreement(0.0, result.numel(), 0) for result in results.values()))

    search.cases(subject, "outputs together", body)


def of_all(run: Run) -> Run:
    """A check of all outputs that have gradients, whose elements are taken one after another as one output."""

    @functools.wraps(run)
    def checked(subject: Subject, search: Search) -> None:
        run(together(subject), search)

    return checked


def joined(function: Callable[..., Any], operation: Operation) -> Callable[..., torch.Tensor]:
    """An implementation of an operation as one that returns its outputs in a row; of one output, itself."""
    names = tuple(operation.outputs)
    return in_a_row(function, names, operation.joined) if names else function


def together(subject: Subject) -> Subject:
    """The subject with its outputs in a row; a subject that has one output as it is."""
    outputs = subject.operation.outputs
    if not outputs:
        return subject
    implementation = _kept(
        in_a_row, subject.implementation, tuple(outputs), subject.operation.joined, subject.dtype.torch
    )
    return replace(subject, implementation=implementation)


@functools.lru_cache(maxsize=16)
def _kept(make: Callable, *arguments: object) -> Callable:
    """The same function for the same arguments, so that what is kept of its results is found again."""
    return make(*arguments)


def requires_gradient(
    implementation: Callable[..., torch.Tensor],
    operation: Operation,
    dtype: DType,
    device: str,
    note: Callable[[Case], None] = lambda case: None,
) -> bool:
    """Whether an implementation's output requires a gradient where its inputs do, in the first example that it takes.

    It is taken to require one where every call fails: what fails here fails in the checks.

    Args:
        implementation: called by the names of the operation's arguments.
        operation: its named examples are tried.
        dtype: of the inputs.
        device: "cpu" or "cuda".
        note: is told of each case before it is run.
    """
    for make in operation.examples.values():
        case = make(dtype)
        names = operation.differentiable_in(case)
        if not names or not case.grad_output.size:
            continue
        note(case)
        tensors = case.tensors(dtype, device)
        for name in names:
            tensors[name].requires_grad_()
        try:
            with held(), random_state_kept():
                output = implementation(**tensors, **case.parameters)
                return any(each.requires_grad for each in (output if isinstance(output, tuple | list) else [output]))
        except OutOfTime:
            break  # another example would take as long
        except (Exception, NotReached):
            continue
    return True
