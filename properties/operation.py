"""The record of an operation: everything that its verification needs to know, and nothing of any backend."""

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from hypothesis.strategies import SearchStrategy

import properties
from properties.case import Case
from properties.dtypes import DType
from properties.far_apart import SHORTEST_AXIS
from properties.running_error import Bounded
from properties.tampering import nothing_else_changes
from properties.workloads import Make


class Result:
    """What one evaluation gives a law: the output and the gradients of the inputs, each with its bound."""

    def __init__(self, output: Callable[[], Bounded], gradients: Callable[[], Mapping[str, Bounded]]):
        self._output, self._gradients = output, gradients

    @cached_property
    def output(self) -> Bounded:
        """The result of the call."""
        return self._output()

    @cached_property
    def gradients(self) -> Mapping[str, Bounded]:
        """The gradients under the case's cotangent; taken when first asked for."""
        return self._gradients()


class Evaluate(Protocol):
    """Runs the implementation under test, or another operation of the same backend, on a case."""

    def __call__(self, case: Case, operation: str | None = None) -> Result:
        """Output and gradients of `case`."""


@dataclass(frozen=True)
class Relation:
    """Two results that a law says are equal, within the sum of their bounds."""

    actual: Bounded
    expected: Bounded


# A law is a function whose name is a sentence. It yields the relations that hold for a case, none where the case is
# outside of what it speaks of.
Law = Callable[[Evaluate, Case, DType], Iterable[Relation]]


@dataclass(frozen=True, kw_only=True)
class DeclaredError:
    """Bad input, and the error that every backend must raise for it before anything is launched.

    Where it takes a wait for the device to know that the input is bad, nothing is raised, and the output is NaN.
    """

    name: str
    arguments: Callable[[str], Mapping[str, Any]]  # of a device
    raises: type[Exception]
    names: str  # the argument that the message must name
    devices: tuple[str, ...] = ("cpu", "cuda")  # that raise it; the output on others is NaN


@dataclass(frozen=True)
class Cost:
    """The least that one call must move and compute: bytes read and written once, and floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation, as its users see it, whoever implements it.

    Attributes:
        name: snake_case; also the module in `oracles` and `properties`, the folder in `impls` and the function there.
        forward: the oracle's, on the inputs and parameters by name. Its running error gives the bound.
        backward: the oracle's, on the cotangent and the same; gives the gradients of `differentiable`, in order.
        differentiable: names of the inputs that have a gradient.
        cases: strategy for a dtype and a number of elements that inputs should stay within.
        examples: named cases that are always run: known bugs of such kernels, declared behaviour.
        smooth: strategy for the cases that gradcheck may differentiate numerically: away from ties and clamps.
        batched: inputs whose first axis is a batch, each with the number of its last axes that belong to one sample.
            The output has the same first axis. Of a sample, the output and the gradients of these inputs depend on no
            other sample.
        laws: relations between results that need no reference.
        errors: bad input and what must come of it.
        cost: forward and backward cost of a case.
        workloads: the cases whose speed is recorded, by name, on "cpu" and on "cuda".
        source: where the operation is defined.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., tuple]
    differentiable: tuple[str, ...]
    cases: Callable[[DType, int], SearchStrategy[Case]]
    examples: Mapping[str, Callable[[DType], Case]]
    smooth: Callable[[DType], SearchStrategy[Case]]
    batched: Mapping[str, int]
    laws: tuple[Law, ...]
    errors: tuple[DeclaredError, ...]
    cost: Callable[[Case], tuple[Cost, Cost]]
    workloads: Mapping[str, Mapping[str, Make]]
    source: str

    def examples_for_offsets(self, dtype: DType) -> dict[str, Case]:
        """Examples by their names, whose offsets are computed by steps that few cases take.

        The one with the most elements, for which there may be kernels of its own; and the one with the fewest of those
        that have an input of three axes or more, none of them short.
        """

        def elements(name: str) -> int:
            return sum(array.size for array in made[name].inputs.values())

        made = {name: make(dtype) for name, make in self.examples.items()}
        deep = [
            name
            for name, case in made.items()
            if any(array.ndim >= 3 and min(array.shape) >= SHORTEST_AXIS for array in case.inputs.values())
        ]
        names = [*sorted(made, key=elements)[-1:], *sorted(deep, key=elements)[:1]]
        return {name: made[name] for name in names}


def operations() -> dict[str, Operation]:
    """Every module of `properties` that defines an ``operation``, by name."""
    found = {}
    for module in pkgutil.iter_modules(properties.__path__):
        operation = getattr(importlib.import_module(f"properties.{module.name}"), "operation", None)
        if isinstance(operation, Operation):
            found[operation.name] = operation
    return found


def wide(case: Case, dtype: DType) -> dict[str, Any]:
    """The inputs of a case as exact `Bounded` arrays (integers as they are), and its parameters."""
    arrays = {
        name: array
        if np.issubdtype(array.dtype, np.integer)
        else Bounded.exact(array.astype(dtype.wide), dtype.arithmetic)
        for name, array in case.inputs.items()
    }
    return {**arrays, **case.parameters}


# What oracles have said of cases that somebody still holds, as a trial of many kernels on the same cases does.
_said: WeakKeyDictionary[Case, dict[tuple[Callable, str], Any]] = WeakKeyDictionary()


def _once(oracle: Callable, case: Case, dtype: DType, ask: Callable[[], Any]) -> Any:
    said = _said.setdefault(case, {})
    if (oracle, dtype.name) not in said:
        said[oracle, dtype.name] = ask()
    return said[oracle, dtype.name]


def reference(operation: Operation, case: Case, dtype: DType) -> Bounded:
    """The oracle's output with its running error."""
    return _once(operation.forward, case, dtype, lambda: operation.forward(**wide(case, dtype)))


def reference_gradients(operation: Operation, case: Case, dtype: DType) -> dict[str, Bounded]:
    """The oracle's gradients with their running error."""

    def ask() -> dict[str, Bounded]:
        grad_output = Bounded.exact(case.grad_output.astype(dtype.wide), dtype.arithmetic)
        return dict(zip(operation.differentiable, operation.backward(grad_output, **wide(case, dtype)), strict=True))

    return dict(_once(operation.backward, case, dtype, ask))


def evaluate_tensors(
    implementation: Callable[..., torch.Tensor],
    operation: Operation,
    case: Case,
    dtype: DType,
    device: str,
    gradients: bool = True,
    place: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
    watch: AbstractContextManager | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Call an implementation on a case; gives its output, the gradients and the tensors it was called with.

    `place` may put each tensor that it is called with elsewhere in memory; `watch` is entered for the call and its
    backward alone.
    """
    tensors = {name: place(name, tensor) for name, tensor in case.tensors(dtype, device).items()}
    wanted = operation.differentiable if gradients else ()
    for name in wanted:
        tensors[name].requires_grad_()
    grad_output = place("grad_output", case.tensor("grad_output", dtype, device)) if wanted else None
    found: dict[str, torch.Tensor] = {}
    with nothing_else_changes(case), watch or contextlib.nullcontext():
        output = implementation(**tensors, **case.parameters)
        if wanted:
            grads = torch.autograd.grad(output, [tensors[name] for name in wanted], grad_output)
            found = dict(zip(wanted, grads, strict=True))
    return output, found, tensors
