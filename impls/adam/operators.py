"""The operator of adam: the same on Triton and CUDA C++ except for the launches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fourfold.backends import known_calls, operators, tuning
from fourfold.backends.signature import signature_of

from .torch_eager import adam as definition

# The number of steps whose factors are kept.
MOST_NUMBERS = 256


class Factors(NamedTuple):
    """The numbers of a step, from its parameters in the digits of Python.

    Attributes:
        kept: the factor of param, ``1 - lr weight_decay``.
        rate: ``lr / (1 - beta1^step)``.
        root: ``1 / sqrt(1 - beta2^step)``, by which the root of v is multiplied.
        eps: added to that product.
        beta1: the factor of m; that of grad is ``new1 = 1 - beta1``.
        new1: see beta1.
        beta2: the factor of v; that of the square of grad is ``new2 = 1 - beta2``.
        new2: see beta2.
    """

    kept: float
    rate: float
    root: float
    eps: float
    beta1: float
    new1: float
    beta2: float
    new2: float


def factors_of(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int) -> Factors:
    """Return the factors of a step."""
    rate, root = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
    return Factors(1 - lr * weight_decay, rate, root, eps, beta1, 1 - beta1, beta2, 1 - beta2)


Changed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def register(backend: str, launch: Callable[..., None]) -> Callable[..., Changed]:
    """Register ``adam_<backend>``.

    Args:
        backend: part of the operator's name.
        launch: ``(param, grad, m, v, factors)`` updates param, m and v. All lie alike and without gaps, and are not
            empty.

    Returns:
        A function of the tensors and the parameters in order, which returns what it has changed, without gradients.
    """

    @torch.no_grad()
    def update(param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, *factors: float) -> None:
        if not param.numel():
            return
        given = param, grad, m, v
        strides = param.stride() if param.is_contiguous() else torch.empty_like(param).stride()
        if all(tensor.stride() == strides for tensor in given):
            launch(*given, Factors(*factors))
            return
        # Parameters with gaps, or of other strides than their states, are rare enough to be copied.
        alike = [tensor.contiguous() for tensor in given]
        launch(*alike, Factors(*factors))
        for tensor, new in zip(given, alike):
            if tensor is not grad and tensor is not new:
                tensor.copy_(new)

    tensors, numbers = range(4), range(4, 4 + len(Factors._fields))
    repeated = known_calls.Repeater(update, tensors, tuning.nothing_forced, numbers)
    schema = (
        f"adam_{backend}(Tensor(a!) param, Tensor grad, Tensor(b!) m, Tensor(c!) v, float lr, float beta1,"
        " float beta2, float eps, float weight_decay, int step) -> ()"
    )
    operator = operators.define(schema, lambda *given: update(*given[:4], *factors_of(*given[4:])), lambda *_: None)
    factors_of_passed: dict[tuple, Factors] = {}  # by numbers that passed the checks

    @torch.no_grad()
    def dispatch(param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, *numbers: Any) -> None:
        # The dispatcher resolves the negative bit of one argument that is changed, and not of several.
        given = param, grad, m, v
        if torch.compiler.is_compiling() or not any(tensor.is_neg() for tensor in given):
            operator(*given, *numbers)
            return
        values = [tensor.resolve_neg() for tensor in given]
        operator(*values, *numbers)
        for tensor, new in zip((param, m, v), (values[0], *values[2:])):
            if tensor is not new:
                tensor.copy_(new)

    def count_change(arguments: tuple) -> Changed:
        param, _, m, v = arguments[:4]
        if not torch.compiler.is_compiling():
            # Autograd then raises where it needs one of them as it was.
            torch.autograd.graph.increment_version((param, m, v))
        return param, m, v

    def call(*arguments: Any) -> Changed:
        if operators.needs_dispatcher(operator, arguments):
            dispatch(*arguments)
            return count_change(arguments)
        if len(factors_of_passed) >= MOST_NUMBERS:
            factors_of_passed.clear()
        factors = factors_of_passed[arguments[4:]] = factors_of(*arguments[4:])
        repeated(*arguments[:4], *factors)
        return count_change(arguments)

    def known(arguments: tuple) -> Changed | None:
        factors = None if operators.is_observed(operator, arguments) else factors_of_passed.get(arguments[4:])
        found = factors and repeated.find((*arguments[:4], *factors))
        if not found:
            return None
        actions, _, values, _ = found
        actions.repeat(values)
        return count_change(arguments)

    call.known = known  # type: ignore[attr-defined]
    return signature_of(definition).checked(call)
