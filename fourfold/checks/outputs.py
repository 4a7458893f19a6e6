"""The checks of operations with several outputs. Each output is verified alone, as an operation of its own.

The gradients are checked under a cotangent for one output and zeros for the others, and once under random cotangents
for all outputs together.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fourfold.candidates.integrity.escapes import convert_escapes
from fourfold.checks.results import describe, named_gradients
from fourfold.checks.search import Search, Subject
from fourfold.instruments.evaluation import gradients_of
from fourfold.instruments.tampering import preserve_random_state
from fourfold.numerics.compare import Agreement
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.not_reached import NotReached
from fourfold.operations.outcomes import Failure
from fourfold.operations.outputs import alone, concatenate_outputs, outputs_of
from fourfold.operations.record import Operation
from fourfold.operations.refusals import OutOfTime

Run = Callable[[Subject, Search], None]


def check_of_output(run: Run, name: str) -> Run:
    """Return a check of one output of a subject that has several."""

    @functools.wraps(run)
    def check(subject: Subject, search: Search) -> None:
        run(select_output(subject, name), search)

    return check


def select_output(subject: Subject, name: str) -> Subject:
    """Return the subject reduced to one of its outputs."""
    names = tuple(subject.operation.outputs)
    implementation = _make_once(alone, subject.implementation, names, names.index(name))
    output = subject.operation.outputs[name]
    # Its large cases have a cotangent for this output alone, too.
    large = None if subject.large is None else replace(subject.large, operation=output)
    subject = replace(subject, operation=output, implementation=implementation, large=large)
    if subject.differentiable and subject.operation.differentiable:
        differentiable = requires_gradient(implementation, subject.operation, subject.dtype, subject.device)
        subject = replace(subject, differentiable=differentiable)
    return subject


def outputs_fit(subject: Subject, search: Search) -> None:
    """Check that the outputs and gradients of one call fit one another, by the record's `admissible`.

    Other checks compare each result by itself.
    """
    operation, names, dtype = subject.operation, tuple(subject.operation.outputs), subject.dtype
    admissible = operation.admissible
    assert admissible is not None

    def body(case: Case) -> None:
        tensors = case.tensors(dtype, subject.device)
        differentiable = operation.differentiable_in(case) if subject.differentiable else ()
        for name in differentiable:
            tensors[name].requires_grad_()
        outputs = dict(zip(names, outputs_of(subject.call(**tensors, **case.parameters), names)))
        results = {name: output.detach() for name, output in outputs.items()}
        if differentiable:
            concatenated = concatenate_outputs(
                lambda: tuple(outputs.values()), names, operation.joined_places, dtype.torch
            )()
            cotangent = case.tensor("grad_output", dtype, subject.device)
            gradients = gradients_of(concatenated, [tensors[name] for name in differentiable], cotangent)
            results |= named_gradients(dict(zip(differentiable, gradients)))
        problem = admissible(case, dtype.arrays(results))
        if problem is not None:
            raise Failure(f"{subject}: {problem}\nwith {describe(tensors)}")
        search.saw(*(Agreement(0.0, result.numel(), 0) for result in results.values()))

    search.cases(subject, "outputs together", body)


def check_of_joined_outputs(run: Run) -> Run:
    """Return a check of all outputs that have gradients, joined into one output."""

    @functools.wraps(run)
    def check(subject: Subject, search: Search) -> None:
        run(together(subject), search)

    return check


def join_outputs(function: Callable[..., Any], operation: Operation) -> Callable[..., torch.Tensor]:
    """Return an implementation that joins its outputs in a row; the function itself if it has one output."""
    names = tuple(operation.outputs)
    return concatenate_outputs(function, names, operation.joined_places) if names else function


def together(subject: Subject) -> Subject:
    """Return the subject with its outputs joined in a row; the subject itself if it has one output."""
    outputs = subject.operation.outputs
    if not outputs:
        return subject
    implementation = _make_once(
        concatenate_outputs,
        subject.implementation,
        tuple(outputs),
        subject.operation.joined_places,
        subject.dtype.torch,
    )
    return replace(subject, implementation=implementation)


@functools.lru_cache(maxsize=16)
def _make_once(make: Callable, *arguments: object) -> Callable:
    """Return the same function for the same arguments, so that caches keyed by the function find its results."""
    return make(*arguments)


def requires_gradient(
    implementation: Callable[..., torch.Tensor],
    operation: Operation,
    dtype: DType,
    device: str,
    note: Callable[[Case], None] = lambda case: None,
) -> bool:
    """Return whether an implementation's output requires a gradient if its inputs do, by the first example that runs.

    Return True if every call fails: the checks will report these failures.

    Args:
        implementation: the function, called by the names of the operation's arguments.
        operation: the operation, whose named examples are tried.
        dtype: the dtype of the inputs.
        device: "cpu" or "cuda".
        note: called with each case before it runs.
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
            with convert_escapes(), preserve_random_state():
                output = implementation(**tensors, **case.parameters)
                return any(o.requires_grad for o in (output if isinstance(output, tuple | list) else [output]))
        except OutOfTime:
            break  # another example would take as long
        except (Exception, NotReached):
            continue
    return True
