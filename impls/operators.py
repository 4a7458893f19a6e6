"""Custom operators: how a kernel's launch becomes an operation that autograd, torch.compile and CUDA graphs understand.

Each backend of an operation registers a forward operator, which takes the public arguments and gives the output and
whatever backward needs, and a backward operator. Both are opaque to the compiler and have a fake, so that
``torch.compile(fullgraph=True)`` traces through them with static and dynamic shapes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

NAMESPACE = "fourfold"
# Library.impl costs about half of what custom_op does on each call, and small losses are mostly call.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_implementations: dict[Any, Callable[..., Any]] = {}


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator for CPU and CUDA tensors.

    Args:
        schema: as torch.library takes it, ``"name(Tensor x, float eps) -> Tensor"``. No argument is mutated and no
            result is a view of one.
        implementation: runs the kernel.
        fake: gives empty results of the right shape, dtype and device.

    Returns:
        The operator, to be called in place of `implementation`.
    """
    name = schema.split("(")[0]
    _library.define(schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    _implementations[operator] = implementation
    return operator


def differentiate(operator: Any, backward: Callable[..., Any], save: Callable[..., None]) -> Callable[..., Any]:
    """Register the gradient of an operator.

    Args:
        operator: what `define` gave.
        backward: ``(ctx, *grad_outputs)`` to a gradient for each argument. Differentiating it again raises.
        save: ``(ctx, inputs, output)`` keeps what backward needs.

    Returns:
        What to call in place of the operator: a call that nobody watches goes straight to the kernel's launch, which
        saves a third of a small call's time.
    """
    torch.library.register_autograd(operator, backward, setup_context=save, lib=_library)
    implementation = _implementations[operator]

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling() or _watched(arguments):
            return operator(*arguments)
        return implementation(*arguments)

    return call


def _watched(arguments: tuple) -> bool:
    """Whether autograd, a transform, a mode, a view or a kind of tensor of its own needs the dispatcher."""
    differentiating = torch.is_grad_enabled()
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and (
            # A tensor with the negative bit, as the imaginary part of a conjugate is, holds its values' negatives.
            type(argument) not in _PLAIN or (differentiating and argument.requires_grad) or argument.is_neg()
        ):
            return True
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def not_differentiable_twice(operator: Any) -> None:
    """Make a backward operator raise where somebody differentiates its result.

    Raises, then:
        NotImplementedError: naming the operator.
    """

    def backward(ctx: Any, *grad_outputs: Any) -> None:
        raise NotImplementedError(f"{operator} has no derivative: gradients of gradients are not implemented")

    torch.library.register_autograd(operator, backward, lib=_library)
