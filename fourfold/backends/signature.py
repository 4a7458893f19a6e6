"""The signature of an operation: one description of its arguments, for checks, operators and records alike.

@signature(x=tensor("... cols"), weight=tensor("cols"), eps=positive(1e-6))
def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

The decorated function checks its arguments before it runs. `signature_of` returns its signature, from which the
operation's kernels get the same checks and their operator, and its record gets the declared cases, errors and axes.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fourfold.backends.arguments import check_alike, check_device, check_floating, check_same
from fourfold.backends.operators import Operator
from fourfold.operations import axes as notation
from fourfold.operations.arguments import KINDS as KINDS
from fourfold.operations.arguments import MASKED as MASKED
from fourfold.operations.arguments import Ragged, TensorInput, Values
from fourfold.operations.arguments import flag as flag
from fourfold.operations.arguments import integers as integers
from fourfold.operations.arguments import lengths as lengths
from fourfold.operations.arguments import not_negative as not_negative
from fourfold.operations.arguments import number as number
from fourfold.operations.arguments import offsets as offsets
from fourfold.operations.arguments import one_of as one_of
from fourfold.operations.arguments import positive as positive
from fourfold.operations.arguments import tensor as tensor
from fourfold.operations.arguments import values as values
from fourfold.operations.claims import claims as claims

_ATTRIBUTE = "__fourfold_signature__"
# The types of parameters in an operator's schema, by the type of their values.
_TYPES = {float: "float", int: "int", bool: "bool", str: "str", torch.dtype: "ScalarType", tuple: "int[]"}


class Signature:
    """The arguments of an operation: tensors on one device, and parameters. The first one is a tensor, and never None.

    Args:
        function: the operation in torch. It has the operation's name.
        arguments: the description of each argument, by name, in order.
        extra: a function of all arguments, by position, which checks what the descriptions cannot say.

    Raises:
        TypeError: the function has other arguments.
        ValueError: the first argument is no floating-point tensor or may be None, no tensor has an axis that limits
            the integers of another, or the values of a parameter depend on sizes, which a signature cannot check.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, TensorInput | Values],
        extra: Callable[..., None] | None = None,
    ) -> None:
        self.function, self.arguments, self._extra = function, dict(arguments), extra
        self.tensors = {name: argument for name, argument in arguments.items() if isinstance(argument, TensorInput)}
        self.parameters = {name: argument for name, argument in arguments.items() if isinstance(argument, Values)}
        self.name, self.names = function.__name__, tuple(arguments)
        self._called = inspect.signature(function)
        parameters = self._called.parameters.values()
        self._defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        if tuple(self._called.parameters) != self.names:
            taken = ", ".join(self._called.parameters)
            raise TypeError(f"signature: {self.name} takes {taken}, and not {', '.join(self.names) or 'nothing'}")
        first = arguments[self.names[0]]
        if isinstance(first, Values) or not first.is_floating or first.optional:
            raise ValueError(f"signature: {self.names[0]} must be a floating-point tensor, and not optional")
        for name, of in self.parameters.items():
            if not of.choices:
                raise ValueError(f"signature: the values of {name} must not depend on sizes")
        axes = {axis for of in self.tensors.values() for axis in notation.names(of.axes)}
        for name, tensor_input in self.tensors.items():
            for field, axis in tensor_input.limiting_axes.items():
                if axis not in axes:
                    raise ValueError(f"signature: no tensor has the axis {axis!r}, which is the {field} of {name}")
        # The tensors that may be None, or have dtypes of their own or axes that the first one lacks. torch.compile does
        # not trace cached properties.
        of_first = {*notation.names(first.axes)}
        self._others = tuple(
            name
            for name, of in self.tensors.items()
            if name != self.names[0] and (of.optional or of.dtypes or not {*notation.names(of.axes)} <= of_first)
        )
        self._patterns = [(self.names.index(n), n, of, notation.pattern(of.axes)) for n, of in self.tensors.items()]

    @property
    def source(self) -> str:
        """Return the place of the operation's definition: the line of its docstring that begins with "Source: "."""
        lines = (inspect.getdoc(self.function) or "").splitlines()
        return next((line.removeprefix("Source: ").rstrip(".") for line in lines if line.startswith("Source: ")), "")

    def checked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that checks its arguments, then passes them to `call` in order.

        The integers of lengths, offsets and indices are checked only on the CPU and outside torch.compile, because a
        GPU would have to be waited for.

        Raises:
            TypeError: an argument is missing, unknown, or not a tensor of its dtype, the dtypes differ, or a parameter
                has another type.
            ValueError: a shape does not fit its axes or the other tensors, the devices differ, or a parameter or an
                integer is out of its range.
        """
        names, count = self.names, len(self.names)
        first, of_first = names[0], self.tensors[names[0]]
        axes, has_own_dtype = of_first.axes, bool(of_first.dtypes)
        pattern = notation.pattern(axes)
        fits_any = axes == (notation.LEADING,)
        later = [(place, name, self._check(name)) for place, name in enumerate(names) if place in self._separate_places]
        checks = [(place, name, of.check) for place, name in enumerate(names) if (of := self.parameters.get(name))]
        together = self._check_others if self._others else None
        extra = self._extra

        @functools.wraps(self.function)
        def checked(*given: Any, **named: Any) -> Any:
            if named or len(given) != count:
                ordered = len(given) == 0 and tuple(named) == names
                given = tuple(named.values()) if ordered else self._bind(given, named)
            tensor = given[0]
            if has_own_dtype:
                _check_own_dtype(first, tensor, of_first)
            else:
                check_floating(first, tensor)
            if not fits_any:
                _check_axes(first, tensor, axes, pattern, {})
            for place, name, check in later:
                check(name, given[place], first, tensor)
            if together is not None:
                together(given)
            for place, name, valid in checks:
                valid(name, given[place])
            if extra is not None:
                extra(*given)
            return call(*given)

        # torch.compile keeps a few versions of a code object, which operations must not share.
        checked.__code__ = checked.__code__.replace(co_name=self.name)  # type: ignore[attr-defined]
        setattr(checked, _ATTRIBUTE, self)
        return checked

    def _bind(self, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a call in order, with the defaults of those that are left out."""
        # Not by inspect, except where it raises: torch.compile has to trace this.
        rest = self.names[len(given) :]
        known = {**self._defaults, **named}
        if len(given) > len(self.names) or any(n not in rest for n in named) or any(n not in known for n in rest):
            self._called.bind(*given, **named)
        return (*given, *[known[name] for name in rest])

    @functools.cached_property
    def check(self) -> Callable[..., None]:
        """The function that checks the arguments and does no more: see `checked`."""
        return self.checked(lambda *given: None)

    @functools.cached_property
    def _separate_places(self) -> tuple[int, ...]:
        """The places of the tensors that are compared with the first one alone."""
        alone = [name for name in self.tensors if name not in self._others]
        return tuple(place for place, name in enumerate(self.names) if place and name in alone)

    def _check_others(self, given: tuple[Any, ...]) -> None:
        """Check the tensors of `_others`, in order."""
        known: dict[str, Any] = {}
        first = self.names[0]
        for place, name, of, pattern in self._patterns:
            value = given[place]
            if value is None and of.optional:
                continue
            if name in self._others:
                if of.dtypes:
                    _check_own_dtype(name, value, of)
                    check_device(name, value, first, given[0])
                else:
                    check_alike(name, value, first, given[0])
            _check_axes(name, value, of.axes, pattern, known)
        # The axis that limits the integers of a tensor may be a later tensor's.
        for place, name, of, _ in self._patterns:
            value = given[place]
            if value is None:
                continue
            if isinstance(of, Ragged):
                _check_total(name, value, of, known)
            if not of.is_floating and value.is_cpu and not torch.compiler.is_compiling():
                _check_range(name, value, of, known)

    def _check(self, name: str) -> Callable[[str, Any, str, torch.Tensor], None]:
        """Return the check of a later argument against the first one."""
        axes, of_first = self.tensors[name].axes, self.tensors[self.names[0]].axes
        if axes == of_first:
            return check_same
        pattern, pattern_of_first = notation.pattern(axes), notation.pattern(of_first)

        def check(name: str, tensor: Any, first_name: str, first: torch.Tensor) -> None:
            check_alike(name, tensor, first_name, first)
            known: dict[str, Any] = {}
            pattern_of_first.fits(first.shape, known)
            _check_axes(name, tensor, axes, pattern, known)

        return check

    def operator(self, fake: Callable[..., Any], results: str = "Tensor output", **fields: Any) -> Operator:
        """Return the operator of these arguments. `fields` are the other ones of `Operator`.

        Args:
            fake: see `Operator`.
            results: the results in the schema, the output first, such as
                ``"(Tensor output, Tensor mean)"``.
            **fields: the other fields of `Operator`.
        """
        return Operator(schema=self.schema(self.name, results), fake=fake, **fields)

    def schema(self, name: str, results: str = "Tensor output") -> str:
        """Return the schema of an operator of these arguments: see `operator`."""
        kinds = {name: f"Tensor{'?' if of.optional else ''}" for name, of in self.tensors.items()}
        kinds |= {n: f"{_TYPES[of.kind]}{'?' if of.optional else ''}" for n, of in self.parameters.items()}
        arguments = ", ".join(f"{kinds[name]} {name}" for name in self.names)
        return f"{name}({arguments}) -> {results}"


def _check_own_dtype(name: str, tensor: Any, of: TensorInput) -> None:
    """Check the dtype of a tensor that has dtypes of its own.

    Raises:
        TypeError: it is no tensor of a declared dtype.
    """
    dtypes = " or ".join(of.dtypes)
    if not isinstance(tensor, torch.Tensor) or str(tensor.dtype).removeprefix("torch.") not in of.dtypes:
        found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a tensor of {dtypes}, not {found}")


def _check_total(name: str, tensor: torch.Tensor, of: Ragged, sizes: Mapping[str, Any]) -> None:
    """Check that the samples of a ragged batch can have all of its rows.

    Raises:
        ValueError: there are no samples, or too few.
    """
    samples, total = tensor.shape[0] - (1 if of.are_offsets else 0), _size(sizes, of.total, name)
    if total and not samples:
        raise ValueError(f"{name} must have a sample for the {total} rows of {of.total}, not none")
    if of.most and total > samples * _size(sizes, of.most, name):
        each = f"at most {sizes[of.most]}, the size of {of.most}"
        raise ValueError(f"{name} must give each sample {each}, but {samples} samples have {total} of {of.total}")


def _size(sizes: Mapping[str, Any], axis: str, name: str) -> int:
    """Return the size of an axis that limits the integers of a tensor.

    Raises:
        ValueError: the tensors with this axis are None.
    """
    if axis not in sizes:
        raise ValueError(f"{name} needs the size of {axis}, but no tensor with this axis was given")
    return sizes[axis]


def _check_range(name: str, tensor: torch.Tensor, tensor_input: TensorInput, sizes: Mapping[str, Any]) -> None:
    """Check the integers of a tensor on the CPU.

    Raises:
        ValueError: one is out of its range, or offsets do not rise from 0 to the number of rows.
    """
    if isinstance(tensor_input, Ragged):
        total = sizes[tensor_input.total]
        counts = tensor.diff() if tensor_input.are_offsets else tensor
        ends = (not tensor_input.are_offsets or int(tensor[0]) == 0) and int(counts.sum()) == total
        most = None if tensor_input.most is None else sizes[tensor_input.most]
        if ends and most is not None and bool((counts > most).any()):
            sample = int((counts > most).nonzero()[0])
            limit = f"at most {most} rows, the size of {tensor_input.most}"
            raise ValueError(f"{name} must give each sample {limit}, not {int(counts[sample])} as to sample {sample}")
        if not ends or bool((counts < 0).any()):
            requirement = (
                f"rise from 0 to {total}" if tensor_input.are_offsets else f"be 0 or more with the sum {total}"
            )
            raise ValueError(f"{name} must {requirement}, the size of {tensor_input.total}, not {tensor.tolist()}")
    elif (
        tensor_input.high is not None and tensor_input.dtypes != ("bool",) and tensor.numel() and not tensor_input.also
    ):
        if isinstance(tensor_input.high, str):
            _size(sizes, tensor_input.high, name)
        low, high = tensor_input.range(sizes)
        least, largest = (int(end) for end in tensor.aminmax())
        if least < low or largest >= high:
            where = f" where {high_name} is {high}," if isinstance(high_name := tensor_input.high, str) else ""
            raise ValueError(f"{name} must be from {low} to {high - 1},{where} not {least} to {largest}")


def _check_axes(
    name: str, tensor: torch.Tensor, axes: notation.Axes, pattern: notation.Pattern, known: dict[str, Any]
) -> None:
    """Check that a tensor has its axes.

    Raises:
        ValueError: it has not.
    """
    sizes = {axis: size for axis, size in known.items() if axis in axes}
    if not pattern.fits(tuple(tensor.shape), known):
        where = f" where {', '.join(f'{axis} is {size}' for axis, size in sizes.items())}," if sizes else ""
        raise ValueError(f"{name} must be [{', '.join(axes)}],{where} not {list(tensor.shape)}")


def signature(
    extra: Callable[..., None] | None = None, /, **arguments: TensorInput | Values
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives an operation in torch its signature, and checks its arguments.

    Args:
        extra: a function of all arguments, by position, which checks what the descriptions cannot say.
        arguments: the description of each argument, by name, in order.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return Signature(function, arguments, extra).checked(function)

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
