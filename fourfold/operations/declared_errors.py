"""Bad input of an operation, and the required errors. Most of them follow from the declaration of its arguments.

ARGUMENTS = Arguments(x=tensor("... cols"), weight=tensor("cols"), eps=positive(1e-5))

From this declaration follow calls with one argument that is not a tensor, has another dtype than the others, is on
another device, has another number of axes or another length, or is out of its range. An operation declares further bad
input by `Arguments.wrong`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fourfold.numerics.dtypes import name_of
from fourfold.operations import axes as notation
from fourfold.operations.arguments import TensorInput, Values
from fourfold.operations.axes import Shape

# The sizes of named axes, in order, and of the axes in "...". They are distinct, and none of them broadcasts.
SIZES = (2, 3, 5, 7, 11, 13, 17, 19)
LEADING = (8, 9)
NOT_FLOATING = (torch.int64, torch.uint8, torch.bool, torch.complex64)
# Bad dtypes for a tensor with one valid dtype: those of the same size, and those that might be converted to it.
NOT_THE_ONLY = (torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, *NOT_FLOATING)
NOT_INTEGERS = (torch.float32, torch.float64, torch.bool, torch.complex64)


@dataclass(frozen=True, kw_only=True)
class DeclaredError:
    """Bad input, and the error that every backend must raise for it before it launches a kernel.

    If detecting the bad input requires a wait for the device, nothing is raised, and the output is NaN.
    """

    name: str
    arguments: Callable[[str], Mapping[str, Any]]  # makes the arguments on a device
    raises: type[Exception]
    names: str  # the argument that the message must name
    devices: tuple[str, ...] = ("cpu", "cuda")  # the devices that raise it; the output on others is NaN


class Arguments:
    """The arguments of an operation, by name, in order. If two tensors do not fit, the error must name the later one.

    Args:
        sizes: sizes in place of `SIZES` for axes whose size depends on the others, by name.
        arguments: the declarations, by name.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None, /, **arguments: TensorInput | Values) -> None:
        self._sizes = sizes or {}
        self._tensors = {name: a for name, a in arguments.items() if isinstance(a, TensorInput)}
        self._parameters = {name: a for name, a in arguments.items() if isinstance(a, Values)}

    @property
    def axes(self) -> dict[str, str]:
        """Return the notation of each tensor's axes."""
        return {name: " ".join(tensor.axes) for name, tensor in self._tensors.items()}

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the known ranges of parameters, by name."""
        return {name: each.range for name, each in self._parameters.items() if each.range is not None}

    @cached_property
    def good(self) -> dict[str, Any]:
        """Return the arguments of a valid call, with tensors on the CPU."""
        tensors = {name: self._tensor(name, shape) for name, shape in self._shapes.items()}
        return tensors | {name: parameter.choices[0] for name, parameter in self._parameters.items()}

    def wrong(
        self,
        name: str,
        raises: type[Exception],
        names: str,
        changes: Mapping[str, Any],
        devices: tuple[str, ...] = ("cpu", "cuda"),
    ) -> DeclaredError:
        """Return bad input: a valid call with some arguments changed, and its CPU tensors moved to the device."""

        def arguments(device: str) -> dict[str, Any]:
            return {argument: _move(device, value) for argument, value in {**self.good, **changes}.items()}

        named = self._tensors[names].says if names in self._tensors else None
        return DeclaredError(name=name, arguments=arguments, raises=raises, names=named or names, devices=devices)

    @cached_property
    def errors(self) -> tuple[DeclaredError, ...]:
        """Return all errors that follow from the arguments."""
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
        floating = [name for name, tensor in self._tensors.items() if not tensor.dtypes]
        for name, tensor in self._tensors.items():
            others: tuple[torch.dtype, ...] = NOT_THE_ONLY if tensor.dtypes else NOT_FLOATING
            others = others if tensor.is_floating else NOT_INTEGERS
            for dtype in (other for other in others if other != self.good[name].dtype):
                yield self._wrong_dtypes(f"{name}_of_{_short(dtype)}", name, {name: dtype})
        if len(floating) > 1:
            yield self._wrong_dtypes("all_of_integers", floating[0], dict.fromkeys(floating, torch.int64))
        for name in floating[1:]:
            for dtype in (torch.float16, torch.float64):
                yield self._wrong_dtypes(f"{name}_of_{_short(dtype)}_among_float32", name, {name: dtype})
            among_half = dict.fromkeys(floating, torch.float16) | {name: torch.float32}
            yield self._wrong_dtypes(f"{name}_of_float32_among_float16", name, among_half)

    def _wrong_dtypes(self, what: str, names: str, dtypes: Mapping[str, torch.dtype]) -> DeclaredError:
        return self.wrong(what, TypeError, names, {name: self.good[name].to(dtype) for name, dtype in dtypes.items()})

    def _other_devices(self) -> Iterator[DeclaredError]:
        for name in list(self._tensors)[1:]:
            yield self.wrong(f"{name}_on_another_device", ValueError, name, {name: self.good[name].to("meta")})

    def _other_shapes(self) -> Iterator[DeclaredError]:
        """Yield errors for a tensor, or all tensors with its axes, of another shape, if that tensor is at fault."""
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
        """Return the shapes of the tensors of a valid call."""
        sizes = dict(self._sizes)
        for tensor in self._tensors.values():
            for name in notation.names(tensor.axes):
                sizes.setdefault(name, SIZES[len(sizes)])
        return {name: notation.shape(tensor.axes, sizes, LEADING) for name, tensor in self._tensors.items()}

    def _misfit(self, shapes: Mapping[str, Shape]) -> str | None:
        """Return the first tensor whose shape does not fit its axes and the earlier tensors; None if all fit."""
        return notation.sizes({name: tensor.axes for name, tensor in self._tensors.items()}, shapes)[1]

    def _tensor(self, name: str, shape: Shape) -> torch.Tensor:
        tensor = self._tensors[name]
        if tensor.is_floating:
            return torch.ones(shape, dtype=getattr(torch, tensor.dtypes[0]) if tensor.dtypes else None)
        return torch.from_numpy(np.resize(np.array(tensor.example, tensor.dtypes[0]), shape))


class ArgumentsOf(Arguments):
    """The arguments of a valid call, with tensors on the CPU and unknown axes.

    Args:
        call: the arguments, by name.
        dtypes: the floating-point tensors whose dtype is the only valid one.
    """

    def __init__(self, call: Mapping[str, Any], dtypes: Collection[str] = ()) -> None:
        tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
        own = {name: not of.is_floating_point() or name in dtypes for name, of in tensors.items()}
        kinds = {n: TensorInput(axes=(), dtypes=(name_of(of.dtype),) if own[n] else ()) for n, of in tensors.items()}
        super().__init__(**kinds)
        self.good = dict(call)

    def _other_shapes(self) -> Iterator[DeclaredError]:
        return iter(())


def _move(device: str, value: Any) -> Any:
    """Return a value on a device. A meta tensor stands for a tensor on another device."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta and device == "cuda":
        # Triton takes a meta tensor for one at address 0. Reading it would make the GPU unusable.
        return torch.ones(value.shape, dtype=value.dtype)
    return value.to(device) if value.is_cpu else value


def other_shapes(shape: Shape, others: Iterable[Shape]) -> list[Shape]:
    """Return wrong shapes: with an axis more or fewer, with an axis longer, shorter or of 1, and the `others`."""
    shapes = [(), shape[1:], shape[:-1], (1, *shape), (*shape[:-2], *shape[-2:][::-1]), *others]
    for axis, size in enumerate(shape):
        shapes += [(*shape[:axis], other, *shape[axis + 1 :]) for other in (size + 1, size - 1, 1)]
    return [other for other in dict.fromkeys(shapes) if other != shape]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
