"""The signature of an operation: one description of its arguments, for checks, operators and records alike.

@signature(x=tensor("... cols"), weight=tensor("cols"))
def scale(x, weight):
    return x * weight

The decorated function checks its arguments before it runs. `signature_of` returns its signature, from which the
operation's kernels get the same checks and their operator, and its record gets the declared errors and the axes.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fourfold.backends.arguments import check_alike, check_floating, check_same
from fourfold.backends.operators import Operator
from fourfold.operations import axes as notation
from fourfold.operations.arguments import TensorInput
from fourfold.operations.arguments import tensor as tensor

_ATTRIBUTE = "__fourfold_signature__"


class Signature:
    """The arguments of an operation: floating-point tensors of one dtype, on one device.

    Args:
        function: the operation in torch. It has the operation's name.
        tensors: the description of each argument, by name, in order.

    Raises:
        TypeError: the function has other arguments.
        ValueError: a tensor is optional or has a dtype of its own, which a signature cannot check.
    """

    def __init__(self, function: Callable[..., Any], tensors: Mapping[str, TensorInput]) -> None:
        self.function, self.tensors = function, dict(tensors)
        self.name, self.names = function.__name__, tuple(tensors)
        self._called = inspect.signature(function)
        if tuple(self._called.parameters) != self.names:
            taken = ", ".join(self._called.parameters)
            raise TypeError(f"signature: {self.name} takes {taken}, and not {', '.join(self.names) or 'nothing'}")
        for name, of in tensors.items():
            if of.optional or of.dtypes:
                raise ValueError(f"signature: {name} must be a tensor of the tested dtype, and not optional")

    @property
    def source(self) -> str:
        """Return the place of the operation's definition: the line of its docstring that begins with "Source: "."""
        lines = (inspect.getdoc(self.function) or "").splitlines()
        return next((line.removeprefix("Source: ").rstrip(".") for line in lines if line.startswith("Source: ")), "")

    def checked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that checks its arguments, then passes them to `call` in order.

        Raises:
            TypeError: an argument is missing, unknown, or not a floating-point tensor, or the dtypes differ.
            ValueError: a shape does not fit its axes or the other tensors, or the devices differ.
        """
        names, count = self.names, len(self.names)
        first, axes = names[0], self.tensors[names[0]].axes
        fits_any = axes == (notation.LEADING,)
        later = [(place, name, self._check(name)) for place, name in enumerate(names) if place]

        @functools.wraps(self.function)
        def checked(*given: Any, **named: Any) -> Any:
            if named:
                ordered = not given and tuple(named) == names
                given = tuple(named.values()) if ordered else self._called.bind(*given, **named).args
            if len(given) != count:
                self._called.bind(*given)
            tensor = given[0]
            check_floating(first, tensor)
            if not fits_any:
                _check_axes(first, tensor, axes, {})
            for place, name, check in later:
                check(name, given[place], first, tensor)
            return call(*given)

        setattr(checked, _ATTRIBUTE, self)
        return checked

    @functools.cached_property
    def check(self) -> Callable[..., None]:
        """The function that checks the arguments and does no more: see `checked`."""
        return self.checked(lambda *given: None)

    def _check(self, name: str) -> Callable[[str, Any, str, torch.Tensor], None]:
        """Return the check of a later argument against the first one."""
        axes, of_first = self.tensors[name].axes, self.tensors[self.names[0]].axes
        if axes == of_first:
            return check_same

        def check(name: str, tensor: Any, first_name: str, first: torch.Tensor) -> None:
            check_alike(name, tensor, first_name, first)
            known: dict[str, Any] = {}
            notation.fits(of_first, first.shape, known)
            _check_axes(name, tensor, axes, known)

        return check

    def operator(self, fake: Callable[..., Any], **fields: Any) -> Operator:
        """Return the operator of these arguments and of one output. `fields` are the other ones of `Operator`."""
        arguments = ", ".join(f"Tensor {name}" for name in self.names)
        return Operator(schema=f"{self.name}({arguments}) -> Tensor output", fake=fake, **fields)


def _check_axes(name: str, tensor: torch.Tensor, axes: notation.Axes, known: dict[str, Any]) -> None:
    """Check that a tensor has its axes.

    Raises:
        ValueError: it has not.
    """
    sizes = {axis: size for axis, size in known.items() if axis in axes}
    if not notation.fits(axes, tuple(tensor.shape), known):
        where = f" where {', '.join(f'{axis} is {size}' for axis, size in sizes.items())}," if sizes else ""
        raise ValueError(f"{name} must be [{', '.join(axes)}],{where} not {list(tensor.shape)}")


def signature(**tensors: TensorInput) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives an operation in torch its signature, and checks its arguments.

    Args:
        tensors: the description of each argument, made by `tensor`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return Signature(function, tensors).checked(function)

    return decorate


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return the signature of an operation.

    Raises:
        TypeError: the function has none.
    """
    found = getattr(function, _ATTRIBUTE, None)
    if found is None:
        name = getattr(function, "__name__", function)
        raise TypeError(f"{name} has no signature: decorate the operation in torch with @signature(...)")
    return found
