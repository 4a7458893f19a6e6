"""The check that calls between a call and its backward pass do not change its gradients."""

import contextlib

import torch

from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.history import change_values, distinguishes
from fourfold.checks.results import (
    case_tensors,
    compare_results,
    describe,
    expected_gradients,
    expected_results,
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

# The dtype of a call in between is the first of these that differs from the subject's.
OTHER_DTYPES = ("float16", "float32")


class _Call:
    """A call whose backward passes come later, with its inputs, its results and copies of both."""

    def __init__(self, subject: Subject, case: Case, name: str) -> None:
        self.subject, self.name = subject, name
        self.expected: dict[str, Bounded] = expected_results(subject, case)
        tensors = case_tensors(subject, case)
        self.cotangent = tensors["grad_output"]
        self.inputs = {name: tensor for name, tensor in tensors.items() if name != "grad_output"}
        self.names = subject.operation.differentiable_in(case)
        for differentiable in self.names:
            self.inputs[differentiable].requires_grad_()
        self.output = subject.call(**self.inputs, **case.parameters)
        self._state = {f"its input {name}": tensor.detach() for name, tensor in self.inputs.items()}
        self._state |= {"the cotangent": self.cotangent, "the output": self.output.detach()}
        self._copies = {name: tensor.clone() for name, tensor in self._state.items()}

    def backward(self, context: str, retain_graph: bool = False) -> list[Agreement]:
        """Run a backward pass, check its gradients, and check that it changed none of the call's tensors."""
        leaves = [self.inputs[name] for name in self.names]
        gradients = gradients_of(self.output, leaves, self.cotangent, retain_graph)
        results = named_results(self.output, dict(zip(self.names, gradients)))
        agreements = compare_results(self.subject, results, self.expected, self.inputs, f"{context}: ")
        for name, count in zip(self._state, differing((self._state[name], self._copies[name]) for name in self._state)):
            if count:
                problem = f"{self.subject}: {context}: a backward pass of {self.name} has changed {name}"
                raise Failure(f"{problem}\nwith {describe(self.inputs)}")
        for name, gradient in zip(self.names, gradients):
            # A gradient may be the cotangent itself, which is kept already.
            self._state[f"the gradient of {name} that it gave before"] = gradient
            self._copies[f"the gradient of {name} that it gave before"] = gradient.clone()
        return agreements


@allow_storage_accuracy
def backward_passes_may_interleave(subject: Subject, search: Search) -> None:
    """Check that neither calls before a backward pass nor a repeated backward pass change a call's gradients.

    Before the backward pass come calls of other values, of other shapes and of another dtype, and one without
    gradients. The backward passes run in the order of the calls. With `retain_graph` a second pass must give the
    first one's gradients, and must leave those, the cotangent and the inputs unchanged.
    """
    subject.needs_gradients()
    smallest = _smallest_of_each_shape(subject)

    def body(case: Case) -> None:
        other = change_values(subject, case)
        # Otherwise the comparison would accept the saved tensors of one call in place of another's.
        need(distinguishes(subject, expected_results(subject, other), expected_results(subject, case)))
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
            # An error that says that it supports no second pass is a refusal of that pass only.
            if search.refusals is None or not is_refusal(error):
                raise
            search.refusals.add(error)
        search.saw(*agreements)

    search.cases(subject, "interleaving", body, sparse=True, extra=subject.small_example())


def _smallest_of_each_shape(subject: Subject) -> list[Case]:
    """Return the two smallest named examples with different shapes and gradients other than 0.

    One of them differs from any given case. The gradients of an empty batch, or of a single class, say nothing.
    """
    cases: list[Case] = []
    for case in sorted(dict(subject.named_examples()).values(), key=lambda c: c.elements):
        differs = not any(_shapes(case) == _shapes(other) for other in cases)
        if differs and any(gradient.value.any() for gradient in expected_gradients(subject, case).values()):
            cases.append(case)
        if len(cases) == 2:
            break
    return cases


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return [array.shape for array in case.inputs.values()]


def _call_of_another_dtype(subject: Subject, case: Case) -> None:
    """Call the implementation on the same values in another dtype, and ignore the result or a refusal."""
    name = next(name for name in OTHER_DTYPES if name != subject.dtype.name)
    if subject.claims.dtypes and name not in subject.claims.dtypes:
        return
    dtype = DTYPES[name]
    tensors = {
        name: tensor.to(dtype.torch) if tensor.is_floating_point() and name not in subject.operation.dtypes else tensor
        for name, tensor in case.tensors(subject.dtype, subject.device).items()
    }
    for key in subject.operation.differentiable_in(case):
        tensors[key].requires_grad_()
    with contextlib.suppress(Exception):
        subject.call(**tensors, **case.parameters)
