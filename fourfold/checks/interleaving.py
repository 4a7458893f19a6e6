"""The check that the gradients of a call are its own, whatever is called between it and its backward pass."""

import contextlib

import torch

from fourfold.checks.grades import graded
from fourfold.checks.history import changed, tells_apart
from fourfold.checks.results import (
    compare_results,
    describe,
    expected_results,
    given_tensors,
    named_results,
)
from fourfold.checks.search import Search, Subject, need
from fourfold.instruments.evaluation import gradients_of
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.compare import Agreement
from fourfold.numerics.dtypes import DTYPES, differing
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure
from fourfold.operations.refusals import is_refusal

# Dtypes of a call in between, of which the first that is not the subject's is taken.
OTHER_DTYPES = ("float16", "float32")


class _Call:
    """A call whose backward passes come later. What it was given, and its results, are kept, with copies."""

    def __init__(self, subject: Subject, case: Case, name: str) -> None:
        self.subject, self.name = subject, name
        self.expected: dict[str, Bounded] = expected_results(subject, case)
        given = given_tensors(subject, case)
        self.cotangent = given["grad_output"]
        self.inputs = {name: tensor for name, tensor in given.items() if name != "grad_output"}
        self.names = subject.operation.differentiable_in(case)
        for each in self.names:
            self.inputs[each].requires_grad_()
        self.output = subject.call(**self.inputs, **case.parameters)
        self._kept = {f"its input {name}": tensor.detach() for name, tensor in self.inputs.items()}
        self._kept |= {"the cotangent": self.cotangent, "the output": self.output.detach()}
        self._copies = {name: tensor.clone() for name, tensor in self._kept.items()}

    def backward(self, when: str, retain_graph: bool = False) -> list[Agreement]:
        """Make a backward pass; check its gradients, and that it has changed none of the call's tensors."""
        leaves = [self.inputs[name] for name in self.names]
        gradients = gradients_of(self.output, leaves, self.cotangent, retain_graph)
        results = named_results(self.output, dict(zip(self.names, gradients)))
        agreements = compare_results(self.subject, results, self.expected, self.inputs, f"{when}: ")
        for name, count in zip(self._kept, differing((self._kept[name], self._copies[name]) for name in self._kept)):
            if count:
                what = f"{self.subject}: {when}: a backward pass of {self.name} has changed {name}"
                raise Failure(f"{what}\nwith {describe(self.inputs)}")
        for name, gradient in zip(self.names, gradients):
            # A gradient may be the cotangent itself, and is then kept already.
            self._kept[f"the gradient of {name} that it gave before"] = gradient
            self._copies[f"the gradient of {name} that it gave before"] = gradient.clone()
        return agreements


@graded
def backward_passes_may_interleave(subject: Subject, search: Search) -> None:
    """The gradients of a call are its own, whatever is called before its backward pass, and however often that runs.

    Calls of other values, of other shapes and of another dtype are made before it, and one without gradients. The
    backward passes run in the order of the calls. With `retain_graph` a second one gives the same as the first, and
    what the first gave, the cotangent and the inputs stay as they were.
    """
    subject.needs_gradients()
    smallest = _smallest_of_each_shape(subject)

    def body(case: Case) -> None:
        other = changed(subject, case)
        # Otherwise what is saved of one call in place of another's would go unnoticed.
        need(tells_apart(subject, expected_results(subject, other), expected_results(subject, case)))
        first = _Call(subject, case, "the first call")
        second = _Call(subject, other, "the second call")
        shapes = next((c for c in smallest if _shapes(c) != _shapes(case)), None)
        third = None if shapes is None else _Call(subject, shapes, "the call of other shapes")
        _call_of_another_dtype(subject, case)
        with torch.no_grad():
            subject.call(**other.tensors(subject.dtype, subject.device), **other.parameters)
        agreements = first.backward("backward of the first of several calls", retain_graph=True)
        if third is not None:
            agreements += third.backward("backward of a call of other shapes, made between others")
        agreements += second.backward("backward of the second of several calls, after that of the first")
        try:
            agreements += first.backward("a second backward pass of one call, with retain_graph")
        except Exception as error:
            # To say loudly that it takes no second pass is a refusal of that alone.
            if search.refusals is None or not is_refusal(error):
                raise
            search.refusals.add(error)
        search.saw(*agreements)

    search.cases(subject, "interleaving", body, few=True, also=subject.small_example())


def _smallest_of_each_shape(subject: Subject) -> list[Case]:
    """The two smallest named examples of different shapes that have gradients: of any case, one has other shapes."""
    made = [make(subject.dtype) for make in subject.operation.examples.values()]
    made = [case for case in made if case.grad_output.size and subject.operation.differentiable_in(case)]
    made.sort(key=lambda case: case.elements)
    return made[:1] + [case for case in made[1:] if _shapes(case) != _shapes(made[0])][:1]


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return [array.shape for array in case.inputs.values()]


def _call_of_another_dtype(subject: Subject, case: Case) -> None:
    """Make a call of the same values in another dtype, of which the result does not matter: it may be refused."""
    name = next(name for name in OTHER_DTYPES if name != subject.dtype.name)
    if subject.claims.dtypes and name not in subject.claims.dtypes:
        return
    dtype = DTYPES[name]
    tensors = {
        each: tensor.to(dtype.torch) if tensor.is_floating_point() else tensor
        for each, tensor in case.tensors(subject.dtype, subject.device).items()
    }
    for each in subject.operation.differentiable_in(case):
        tensors[each].requires_grad_()
    with contextlib.suppress(Exception):
        subject.call(**tensors, **case.parameters)
