"""Generic planted faults: the torch version of any operation, made wrong in one way, without code per operation."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold import backends
from fourfold.checks.backward import backward_agrees
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.history import history_does_not_matter
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.outputs import join_outputs
from fourfold.checks.repeatability import repeats_bit_for_bit
from fourfold.operations.outputs import READS_BACK, read_back
from fourfold.operations.record import Operation

from .planted import GRADIENT, UNWRITTEN, Fault, Implementation

Tensor = torch.Tensor


class Replaced(torch.autograd.Function):
    """Replace a result, and keep its gradient."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, other: Tensor) -> Tensor:
        return other.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple:
        return grad_output, None


class Halved(torch.autograd.Function):
    """Return the input unchanged, and halve its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output / 2


def replacing(right: Implementation, other: Callable[[Tensor], Tensor]) -> Implementation:
    """Return an implementation whose result `other` replaces."""

    def implementation(**arguments: Any) -> Tensor:
        result = right(**arguments)
        return Replaced.apply(result, other(result.detach()))

    return implementation


def with_torchs_gradient(operation: str, forward: Implementation) -> Implementation:
    """Return an implementation with the gradient and the argument check of the one in torch."""
    right = backends.load(operation, "torch")

    def implementation(**arguments: Any) -> Any:
        results = right(**arguments)
        with torch.no_grad():
            others = forward(**arguments)
        if isinstance(results, tuple):
            return tuple(map(Replaced.apply, results, others))
        return Replaced.apply(results, others)

    return implementation


def last_element_unwritten(result: Tensor) -> Tensor:
    """Leave the last element unwritten, as a grid with too few blocks does."""
    output = torch.empty_like(result)
    output.view(-1)[:-1] = result.reshape(-1)[:-1]
    return output


def another_every_time() -> Callable[[Tensor], Tensor]:
    """Change the result on every call, as floating-point atomics may."""
    calls = 0

    def other(result: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return result * (1 + 1e-6 * calls)

    return other


def remembered_by_shape() -> Callable[[Tensor], Tensor]:
    """Return the first result for a shape again, as a captured graph does if its inputs are not copied in."""
    kept: dict[Any, Tensor] = {}

    def other(result: Tensor) -> Tensor:
        return kept.setdefault(result.shape, result.clone())

    return other


def gradient_halved(right: Implementation, name: str) -> Implementation:
    """Halve the gradient of one input."""
    return lambda **arguments: right(**{**arguments, name: Halved.apply(arguments[name])})


def input_overwritten(right: Implementation, name: str) -> Implementation:
    """Overwrite an input, as a kernel that works in place does."""

    def implementation(**arguments: Any) -> Tensor:
        result, given = right(**arguments), arguments[name]
        if 0 not in given.stride():
            given.copy_(-given.double())  # torch negates no float8
        return result

    return implementation


def errors_dropped(right: Implementation) -> Implementation:
    """Accept bad input instead of raising an error."""

    def implementation(**arguments: Any) -> Tensor:
        try:
            return right(**arguments)
        except (TypeError, ValueError):
            return torch.zeros(())

    return implementation


def faults_of(operation: Operation) -> tuple[Fault, ...]:
    """Return the generic faults of an operation, each with the check that must reject it."""
    own = backends.load(operation.name, "torch")
    right = join_outputs(read_back(own, operation.mutates, ()) if operation.mutates else own, operation)
    name = next(iter((*operation.differentiable, *operation.axes)))

    def of(fault: str, make: Callable[[], Implementation], **more: Any) -> Fault:
        def made() -> Implementation:
            implementation = make()
            setattr(implementation, READS_BACK, bool(operation.mutates))
            return implementation

        return Fault(f"generic_{fault}", operation.name, made, **more)

    def of_result(fault: str, other: Callable[[Tensor], Tensor], **more: Any) -> Fault:
        return of(fault, lambda: replacing(right, other), **more)

    halved = of("gradient_halved", lambda: gradient_halved(right, name), check=backward_agrees, says=GRADIENT)
    again = "output differs between two calls"
    return (
        of_result("output_negated", torch.neg),
        *[halved] * bool(operation.differentiable),
        of("input_overwritten", lambda: input_overwritten(right, name), says=f"the call changed its input {name}"),
        of_result("last_element_unwritten", last_element_unwritten, check=memory_is_respected, says=UNWRITTEN),
        of_result("another_every_time", another_every_time(), check=repeats_bit_for_bit, says=again),
        of_result("remembered_by_shape", remembered_by_shape(), check=history_does_not_matter, says="output"),
        of("errors_dropped", lambda: errors_dropped(right), check=declared_errors_are_raised, says="was raised"),
    )
