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
        ValueError: the first argument is no tensor or may be None, no tensor has an axis that limits the integers of
            another, or the values of a parameter depend on sizes, which a signature cannot check.
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
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        if tuple(self._called.parameters) != self.names:
            actual = ", ".join(self._called.parameters)
            raise TypeError(f"signature: {self.name} takes {actual}, and not {', '.join(self.names) or 'nothing'}")
        first = arguments[self.names[0]]
        if isinstance(first, Values) or first.optional:
            raise ValueError(f"signature: {self.names[0]} must be a tensor, and not optional")
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
        self._joint = tuple(
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
        GPU would have to be waited for. A call that `call` knows passed the checks before: see
        `fourfold.backends.operators.differentiate`.

        Args:
            call: takes the arguments.

        Raises:
            TypeError: an argument is missing, unknown, or not a tensor of its dtype, the dtypes differ, or a parameter
                has another type.
            ValueError: a shape does not fit its axes or the other tensors, the devices differ, or a parameter or an
                integer is out of its range.
        """
        names, count = self.names, len(self.names)
        first, first_input = names[0], self.tensors[names[0]]
        axes, has_own_dtype = first_input.axes, bool(first_input.dtypes)
        pattern = notation.pattern(axes)
        fits_any = axes == (notation.LEADING,)
        later = [(place, name, self._check(name)) for place, name in enumerate(names) if place in self._separate_places]
        checks = [(names.index(name), name, values.check) for name, values in self.parameters.items()]
        together = self._check_joint if self._joint else None
        extra, known = self._extra, getattr(call, "known", None)

        @functools.wraps(self.function)
        def checked(*arguments: Any, **keywords: Any) -> Any:
            if keywords or len(arguments) != count:
                ordered = len(arguments) == 0 and tuple(keywords) == names
                arguments = tuple(keywords.values()) if ordered else self._bind(arguments, keywords)
            results = None if known is None else known(arguments)
            if results is None:
                tensor = arguments[0]
                if has_own_dtype:
                    _check_own_dtype(first, tensor, first_input)
                else:
                    check_floating(first, tensor)
                if not fits_any:
                    _check_axes(first, tensor, axes, pattern, {})
                for place, name, check in later:
                    check(name, arguments[place], first, tensor)
                if together is not None:
                    together(arguments)
                for place, name, valid in checks:
                    valid(name, arguments[place])
                if extra is not None:
                    extra(*arguments)
                results = call(*arguments)
            return results

        # torch.compile keeps a few versions of a code object, which operations must not share.
        checked.__code__ = checked.__code__.replace(co_name=self.name)  # type: ignore[attr-defined]
        setattr(checked, _ATTRIBUTE, self)
        return checked

    def _bind(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a call in order, with the defaults of those that are left out."""
        # Not by inspect, except where it raises: torch.compile has to trace this.
        values, names, unused = list(arguments), self.names, len(keywords)
        for name in names[len(arguments) :]:
            if name in keywords:
                values.append(keywords[name])
                unused -= 1
            elif name in self._defaults:
                values.append(self._defaults[name])
        if unused or len(values) != len(names):
            self._called.bind(*arguments, **keywords)
        return tuple(values)

    @functools.cached_property
    def check(self) -> Callable[..., None]:
        """The function that checks the arguments and does no more: see `checked`."""
        return self.checked(lambda *given: None)

    @functools.cached_property
    def _separate_places(self) -> tuple[int, ...]:
        """The places of the tensors that are compared with the first one alone."""
        alone = [name for name in self.tensors if name not in self._joint]
        return tuple(place for place, name in enumerate(self.names) if place and name in alone)

    def _check_joint(self, arguments: tuple[Any, ...]) -> None:
        """Check the tensors of `_others`, in order."""
        sizes: dict[str, Any] = {}
        first = self.names[0]
        for place, name, tensor_input, pattern in self._patterns:
            value = arguments[place]
            if value is None and tensor_input.optional:
                continue
            if name in self._joint:
                if tensor_input.dtypes:
                    _check_own_dtype(name, value, tensor_input)
                    check_device(name, value, first, arguments[0])
                else:
                    check_alike(name, value, first, arguments[0])
            _check_axes(name, value, tensor_input.axes, pattern, sizes)
        # The axis that limits the integers of a tensor may be a later tensor's.
        for place, name, tensor_input, _ in self._patterns:
            value = arguments[place]
            if value is None:
                continue
            if isinstance(tensor_input, Ragged):
                _check_total(name, value, tensor_input, sizes)
            if not tensor_input.is_floating and value.is_cpu and not torch.compiler.is_compiling():
                _check_range(name, value, tensor_input, sizes)

    def _check(self, name: str) -> Callable[[str, Any, str, torch.Tensor], None]:
        """Return the check of a later argument against the first one."""
        axes, first_axes = self.tensors[name].axes, self.tensors[self.names[0]].axes
        if axes == first_axes:
            return check_same
        pattern, first_pattern = notation.pattern(axes), notation.pattern(first_axes)

        def check(name: str, tensor: Any, first_name: str, first: torch.Tensor) -> None:
            check_alike(name, tensor, first_name, first)
            sizes: dict[str, Any] = {}
            first_pattern.fits(first.shape, sizes)
            _check_axes(name, tensor, axes, pattern, sizes)

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


def _check_own_dtype(name: str, tensor: Any, tensor_input: TensorInput) -> None:
    """Check the dtype of a tensor that has dtypes of its own.

    Raises:
        TypeError: it is no tensor of a declared dtype.
    """
    dtypes = " or ".join(tensor_input.dtypes)
    if not isinstance(tensor, torch.Tensor) or str(tensor.dtype).removeprefix("torch.") not in tensor_input.dtypes:
        actual = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a tensor of {dtypes}, not {actual}")


def _check_total(name: str, tensor: torch.Tensor, ragged: Ragged, sizes: Mapping[str, Any]) -> None:
    """Check that the samples of a ragged batch can have all of its rows.

    Raises:
        ValueError: there are no samples, or too few.
    """
    samples, total = tensor.shape[0] - (1 if ragged.are_offsets else 0), _size(sizes, ragged.total, name)
    if total and not samples:
        raise ValueError(f"{name} must have a sample for the {total} rows of {ragged.total}, not none")
    if ragged.most and total > samples * _size(sizes, ragged.most, name):
        each = f"at most {sizes[ragged.most]}, the size of {ragged.most}"
        raise ValueError(f"{name} must give each sample {each}, but {samples} samples have {total} of {ragged.total}")


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
    name: str, tensor: torch.Tensor, axes: notation.Axes, pattern: notation.Pattern, sizes: dict[str, Any]
) -> None:
    """Check that a tensor has its axes.

    Raises:
        ValueError: it has not.
    """
    known = dict(sizes)
    if not pattern.fits(tuple(tensor.shape), sizes):
        fixed = {axis: size for axis, size in known.items() if axis in (*axes, *notation.names(axes))}
        where = f" where {', '.join(f'{axis} is {size}' for axis, size in fixed.items())}," if fixed else ""
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
    result = getattr(function, _ATTRIBUTE, None)
    if result is None:
        name = getattr(function, "__name__", function)
        raise TypeError(f"{name} has no signature: decorate the operation in torch with @signature(...)")
    return result
