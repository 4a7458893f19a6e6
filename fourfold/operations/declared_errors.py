"""Bad input of an operation, and the error that must come of it: most of it follows from what its arguments are.

ARGUMENTS = Arguments(x=tensor("... cols"), weight=tensor("cols"), eps=positive(1e-5))

Of these follow calls with one argument that is no tensor, has another dtype than the others, is on another device, has
another number of axes or another length, or is out of its range. What an operation refuses beyond that it declares by
`Arguments.wrong`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fourfold.operations import axes as notation
from fourfold.operations.axes import Shape

# Sizes of named axes, in the order of their names, and what "..." stands for: no two alike, and none that broadcasts.
SIZES = (2, 3, 5, 7, 11, 13, 17)
LEADING = (8, 9)
NOT_FLOATING = (torch.int64, torch.uint8, torch.bool, torch.complex64)
# How the name of a tensor's place in another memory ends.
ON_ANOTHER_DEVICE = "_on_another_device"
# For a tensor of one dtype: those of the same size, and those to which it might be converted.
NOT_THE_ONLY = (torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, *NOT_FLOATING)
NOT_INTEGERS = (torch.float32, torch.float64, torch.bool, torch.complex64)


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
class TensorArgument:
    """A tensor argument: see `tensor` and `integers`."""

    axes: tuple[str, ...] | None
    integers: tuple[int, ...] | None = None
    says: str | None = None
    optional: bool = False
    dtype: torch.dtype | None = None  # the only one that is taken; None: the floating-point dtype of the others


@dataclass(frozen=True)
class Parameter:
    """An argument that is no tensor: a value that is taken, and by what is wrong with them, values that are not."""

    good: Any
    out_of_range: Mapping[str, Any] = field(default_factory=dict)
    of_another_type: Mapping[str, Any] = field(default_factory=dict)
    range: tuple[float, float] | None = None  # any number between the two is taken


def tensor(axes: str | None, says: str | None = None, dtype: torch.dtype | None = None) -> TensorArgument:
    """A floating-point tensor.

    Args:
        axes: ``"... cols"``: see `fourfold.operations.axes`. None where nothing is known of them.
        says: what a message must have that names the argument, where its name is a word of English.
        dtype: the only dtype that is taken, as float8_e4m3fn of a quantised matrix or float32 of its scales. Unless
            given, each that is tested, which such tensors share.
    """
    return TensorArgument(None if axes is None else notation.parse(axes), says=says, dtype=dtype)


def integers(axes: str, *values: int, optional: bool = False) -> TensorArgument:
    """An int64 tensor, or None if it is optional, and its values in a call of tensors whose axes are `SIZES` long."""
    return TensorArgument(notation.parse(axes), values, optional=optional)


def positive(good: float) -> Parameter:
    """A number that must be above 0 and finite."""
    within = not_negative(good)
    return Parameter(good, {"zero": 0.0, **within.out_of_range}, within.of_another_type, within.range)


def not_negative(good: float) -> Parameter:
    """A number that must be 0 or above, and finite."""
    out_of_range = {"negative": -good, "not_a_number": math.nan, "infinite": math.inf, "lowest": -math.inf}
    return Parameter(good, out_of_range, {"a_string": str(good), "none": None}, (0.0, math.inf))


def one_of(*choices: str) -> Parameter:
    """One of some strings; the first is taken where another argument is wrong."""
    return Parameter(choices[0], {"unknown": "no_such_choice"}, {"a_number": 1, "none": None})


class Arguments:
    """The arguments of an operation, by name, in order: of two tensors that do not fit the later one is to be named.

    Args:
        sizes: of axes that may not have just any size beside the others, in place of one of `SIZES`.
        arguments: by name.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None, /, **arguments: TensorArgument | Parameter) -> None:
        self._sizes = sizes or {}
        self._tensors = {name: a for name, a in arguments.items() if isinstance(a, TensorArgument)}
        self._parameters = {name: a for name, a in arguments.items() if isinstance(a, Parameter)}

    @property
    def axes(self) -> dict[str, str]:
        """The notation of each tensor's axes, of those of which something is known."""
        return {name: " ".join(tensor.axes) for name, tensor in self._tensors.items() if tensor.axes is not None}

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The numbers between which each parameter may be, of those of which that is known."""
        return {name: each.range for name, each in self._parameters.items() if each.range is not None}

    @cached_property
    def good(self) -> dict[str, Any]:
        """A call that is right, of tensors on the CPU."""
        made = {name: self._tensor(name, shape) for name, shape in self._shapes.items()}
        return made | {name: parameter.good for name, parameter in self._parameters.items()}

    def wrong(
        self,
        name: str,
        raises: type[Exception],
        names: str,
        changes: Mapping[str, Any],
        devices: tuple[str, ...] = ("cpu", "cuda"),
    ) -> DeclaredError:
        """Bad input: a good call with some arguments changed; those that are tensors on the CPU go to the device."""

        def arguments(device: str) -> dict[str, Any]:
            return {argument: _on(device, value) for argument, value in {**self.good, **changes}.items()}

        named = self._tensors[names].says if names in self._tensors else None
        return DeclaredError(name=name, arguments=arguments, raises=raises, names=named or names, devices=devices)

    @cached_property
    def errors(self) -> tuple[DeclaredError, ...]:
        """All that follow."""
        return (
            *self._no_tensors(),
            *self._other_dtypes(),
            *self._other_devices(),
            *self._other_shapes(),
            *self._other_parameters(),
        )

    def _no_tensors(self) -> Iterator[DeclaredError]:
        for name, tensor in self._tensors.items():
            given = self.good[name]
            array = given.float().numpy() if given.dtype.itemsize == 1 else given.numpy()
            for what, value in {"number": 1.0, "list": given.tolist(), "array": array, "none": None}.items():
                if value is not None or not tensor.optional:
                    yield self.wrong(f"{name}_is_{what}", TypeError, name, {name: value})

    def _other_dtypes(self) -> Iterator[DeclaredError]:
        floating = [name for name, tensor in self._tensors.items() if tensor.integers is None and not tensor.dtype]
        for name, tensor in self._tensors.items():
            others: tuple[torch.dtype, ...] = NOT_FLOATING if tensor.integers is None else NOT_INTEGERS
            others = NOT_THE_ONLY if tensor.dtype else others
            for dtype in (other for other in others if other != self.good[name].dtype):
                yield self._of_dtypes(f"{name}_of_{_short(dtype)}", name, {name: dtype})
        if len(floating) > 1:
            yield self._of_dtypes("all_of_integers", floating[0], dict.fromkeys(floating, torch.int64))
        for name in floating[1:]:
            for dtype in (torch.float16, torch.float64):
                yield self._of_dtypes(f"{name}_of_{_short(dtype)}_among_float32", name, {name: dtype})
            among_half = dict.fromkeys(floating, torch.float16) | {name: torch.float32}
            yield self._of_dtypes(f"{name}_of_float32_among_float16", name, among_half)

    def _of_dtypes(self, what: str, names: str, dtypes: Mapping[str, torch.dtype]) -> DeclaredError:
        return self.wrong(what, TypeError, names, {name: self.good[name].to(dtype) for name, dtype in dtypes.items()})

    def _other_devices(self) -> Iterator[DeclaredError]:
        for name in list(self._tensors)[1:]:
            yield self.wrong(f"{name}{ON_ANOTHER_DEVICE}", ValueError, name, {name: self.good[name].to("meta")})

    def _other_shapes(self) -> Iterator[DeclaredError]:
        """One tensor of another shape, or all that are to have one of another; where what is wrong is the one named."""
        seen = set()
        for name, tensor in self._tensors.items():
            alike = [other for other, of in self._tensors.items() if of.axes == tensor.axes]
            for shape in other_shapes(self._shapes[name], self._shapes.values()):
                for changed in ([name], alike):
                    shapes = self._shapes | dict.fromkeys(changed, shape)
                    if self._misfit(shapes) == name and tuple(shapes.items()) not in seen:
                        seen.add(tuple(shapes.items()))
                        what = f"{'_and_'.join(changed)}_of_shape_{'_'.join(map(str, shape)) or 'no_axis'}"
                        changes = {each: self._tensor(each, shape) for each in changed}
                        yield self.wrong(what, ValueError, name, changes)

    def _other_parameters(self) -> Iterator[DeclaredError]:
        for name, parameter in self._parameters.items():
            for what, value in parameter.out_of_range.items():
                yield self.wrong(f"{name}_{what}", ValueError, name, {name: value})
            for what, value in parameter.of_another_type.items():
                yield self.wrong(f"{name}_{what}", TypeError, name, {name: value})

    # ---- shapes

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        """Of the tensors of a good call."""
        sizes = dict(self._sizes)
        for tensor in self._tensors.values():
            for name in notation.names(tensor.axes or ()):
                sizes.setdefault(name, SIZES[len(sizes)])
        return {
            name: notation.shape(tensor.axes or (notation.LEADING,), sizes, LEADING)
            for name, tensor in self._tensors.items()
        }

    def _misfit(self, shapes: Mapping[str, Shape]) -> str | None:
        """The first tensor whose shape is not what its axes say, where the earlier ones are as long as they are."""
        known: dict[str, Any] = {}
        for name, tensor in self._tensors.items():
            if tensor.axes is not None and not notation.fits(tensor.axes, shapes[name], known):
                return name
        return None

    def _tensor(self, name: str, shape: Shape) -> torch.Tensor:
        values = self._tensors[name].integers
        return (
            torch.ones(shape, dtype=self._tensors[name].dtype)
            if values is None
            else torch.from_numpy(np.resize(np.array(values, np.int64), shape))
        )


class ArgumentsOf(Arguments):
    """The arguments of a call that is right, of tensors on the CPU of whose axes nothing is known."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
        kinds = {name: TensorArgument(None, None if of.is_floating_point() else ()) for name, of in tensors.items()}
        super().__init__(**kinds)
        self.good = dict(call)


def _on(device: str, value: Any) -> Any:
    """A tensor on a device; one without memory, which stands for another device, is then on another."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta and device == "cuda":
        # Triton takes a tensor without memory for one at address 0, and reading it would end the use of the GPU.
        return torch.ones(value.shape, dtype=value.dtype)
    return value.to(device) if value.is_cpu else value


def other_shapes(shape: Shape, others: Iterable[Shape]) -> list[Shape]:
    """What a shape may be mistaken for: with an axis more or fewer, one longer, shorter or of 1, and the `others`."""
    found = [(), shape[1:], shape[:-1], (1, *shape), (*shape[:-2], *shape[-2:][::-1]), *others]
    for axis, size in enumerate(shape):
        found += [(*shape[:axis], other, *shape[axis + 1 :]) for other in (size + 1, size - 1, 1)]
    return [other for other in dict.fromkeys(found) if other != shape]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
