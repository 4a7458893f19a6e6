"""Conversion of a user's function to an operation's calling convention."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fourfold.candidates.load import models


class CannotBeCalled(ValueError):
    """The candidate is no function with the operation's arguments."""


def as_operation(candidate: Any, target: inspect.Signature, operation: str) -> Callable[..., Any]:
    """Return a function that takes an operation's arguments by name.

    It passes the arguments by name if the candidate has these names, or else in their order. Arguments that a
    module's ``forward`` does not take are its weights: see `fourfold.candidates.load.models.module`.

    Args:
        candidate: a function, an ``autograd.Function``, an ``nn.Module`` or its class.
        target: the operation's arguments.
        operation: its name, for messages.

    Raises:
        CannotBeCalled: `candidate` is none of these, or does not take the arguments.
    """
    function = candidate
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        try:
            function = function()
        except TypeError as error:
            name = function.__name__
            raise CannotBeCalled(
                f"{name}() raises TypeError: {error}; give an instance,"
                f" or fourfold.module(make), where make returns one for the arguments of a call"
            ) from None
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        function = function.apply  # type: ignore[attr-defined]
    if _is_kernel_of_triton(function):
        raise CannotBeCalled(f"{_name(function)} is a Triton kernel: give the function that launches it")
    if not callable(function):
        raise CannotBeCalled(f"a {type(function).__name__} is no function: it cannot be called as {operation}{target}")
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        # Before torch 2.13, `apply` takes no arguments by name.
        return order_arguments(function, target, {})
    try:
        signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError):  # the function is not written in Python
        return order_arguments(function, target, {})
    with contextlib.suppress(TypeError):
        signature.bind(**dict.fromkeys(target.parameters))
        return supply_defaults(function, signature, target)
    try:
        signature.bind(*target.parameters)
    except TypeError as error:
        if isinstance(function, torch.nn.Module) and _takes_weights(function, signature, target):
            return models.function_of(function)
        if isinstance(function, torch.nn.Module):
            error = TypeError(f"{error}; fourfold.module(make) makes one for the arguments of each call")
        raise CannotBeCalled(f"{_name(function)}{signature} cannot be called as {operation}{target}: {error}") from None
    return order_arguments(function, target, signature.parameters)


def _takes_weights(model: torch.nn.Module, signature: inspect.Signature, target: inspect.Signature) -> bool:
    """Return whether a module takes an operation's arguments when arguments named after its weights replace them."""
    names = [name for name in target.parameters if models.weight_of(model, name) is None]
    for positional, keywords in ((names, ()), ((), names)):
        with contextlib.suppress(TypeError):
            signature.bind(*positional, **dict.fromkeys(keywords))
            return len(names) < len(target.parameters)
    return False


def _is_kernel_of_triton(value: Any) -> bool:
    """Return whether an object results from ``@triton.jit`` or ``@triton.autotune``, compiled or interpreted."""
    runtime = sys.modules.get("triton.runtime.jit")
    return runtime is not None and isinstance(value, runtime.KernelInterface)


def _name(value: Any) -> str:
    inner = getattr(value, "fn", value)  # of a kernel of Triton's: the function
    return getattr(inner, "__name__", type(value).__name__)


def supply_defaults(
    function: Callable[..., Any], signature: inspect.Signature, target: inspect.Signature
) -> Callable[..., Any]:
    """Return the function if it has all of the operation's defaults, or else a wrapper that supplies them."""
    defaults = {name: p.default for name, p in target.parameters.items() if p.default is not p.empty}
    values = {
        name: value
        for name, value in defaults.items()
        if name in signature.parameters and signature.parameters[name].default is inspect.Parameter.empty
    }
    if not values:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**values, **kwargs})

    return call


def order_arguments(
    function: Callable[..., Any], target: inspect.Signature, parameters: Mapping[str, inspect.Parameter]
) -> Callable[..., Any]:
    """Return a wrapper that passes its arguments in the operation's order.

    An argument that is left out has the default of the function's own parameter or, if it has none, the operation's.
    """
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    places = zip(target.parameters, (p for p in parameters.values() if p.kind in kinds))
    empty = inspect.Parameter.empty
    own_defaults = {name: p.default for name, p in places if p.default is not empty}
    defaults = {name: p.default for name, p in target.parameters.items() if p.default is not empty} | own_defaults

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = defaults | target.bind(*args, **kwargs).arguments
        return function(*(arguments[name] for name in target.parameters))

    return call
