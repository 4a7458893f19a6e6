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
from fourfold.operations.arguments import Ragged, TensorInput, Values
from fourfold.operations.axes import Shape

# The sizes of named axes, in order, and of the axes in "...". They are distinct, and none of them broadcasts. Blocks of
# an axis are two: it is longer by a block.
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
        self.declared: dict[str, Any] = dict(arguments)
        self._tensors = {name: a for name, a in arguments.items() if isinstance(a, TensorInput)}
        self._parameters = {name: a for name, a in arguments.items() if isinstance(a, Values)}

    @property
    def axes(self) -> dict[str, str]:
        """Return the notation of each tensor's axes."""
        return {name: " ".join(tensor.axes) for name, tensor in self._tensors.items()}

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the known ranges of parameters, by name."""
        return {name: parameter.range for name, parameter in self._parameters.items() if parameter.range is not None}

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

        phrase = self._tensors[names].says if names in self._tensors else None
        return DeclaredError(name=name, arguments=arguments, raises=raises, names=phrase or names, devices=devices)

    @cached_property
    def errors(self) -> tuple[DeclaredError, ...]:
        """Return all errors that follow from the arguments."""
        return (
            *self._no_tensors(),
            *self._other_dtypes(),
            *self._other_devices(),
            *self._other_shapes(),
            *self._other_integers(),
            *self._other_parameters(),
        )

    def _no_tensors(self) -> Iterator[DeclaredError]:
        for name, tensor in self._tensors.items():
            right = self.good[name]
            array = right.float().numpy() if right.dtype.itemsize == 1 else right.numpy()
            for kind, value in {"number": 1.0, "list": right.tolist(), "array": array, "none": None}.items():
                if value is not None or not tensor.optional:
                    yield self.wrong(f"{name}_is_{kind}", TypeError, name, {name: value})

    def _other_dtypes(self) -> Iterator[DeclaredError]:
        floating = [name for name, tensor in self._tensors.items() if not tensor.dtypes]
        for name, tensor in self._tensors.items():
            dtypes: tuple[torch.dtype, ...] = NOT_THE_ONLY if tensor.dtypes else NOT_FLOATING
            dtypes = dtypes if tensor.is_floating else NOT_INTEGERS
            for dtype in (d for d in dtypes if d != self.good[name].dtype and name_of(d) not in tensor.dtypes):
                yield self._wrong_dtypes(f"{name}_of_{_short(dtype)}", name, {name: dtype})
        if len(floating) > 1:
            yield self._wrong_dtypes("all_of_integers", floating[0], dict.fromkeys(floating, torch.int64))
        for name in floating[1:]:
            for dtype in (torch.float16, torch.float64):
                yield self._wrong_dtypes(f"{name}_of_{_short(dtype)}_among_float32", name, {name: dtype})
            among_half = dict.fromkeys(floating, torch.float16) | {name: torch.float32}
            yield self._wrong_dtypes(f"{name}_of_float32_among_float16", name, among_half)

    def _wrong_dtypes(self, label: str, names: str, dtypes: Mapping[str, torch.dtype]) -> DeclaredError:
        return self.wrong(label, TypeError, names, {name: self.good[name].to(dtype) for name, dtype in dtypes.items()})

    def _other_devices(self) -> Iterator[DeclaredError]:
        for name in list(self._tensors)[1:]:
            yield self.wrong(f"{name}_on_another_device", ValueError, name, {name: self.good[name].to("meta")})

    def _other_shapes(self) -> Iterator[DeclaredError]:
        """Yield errors for a tensor, or all tensors with its axes, of another shape, if that tensor is at fault."""
        reported = set()
        for name, tensor in self._tensors.items():
            same_axes = [other for other, t in self._tensors.items() if t.axes == tensor.axes]
            for shape in other_shapes(self._shapes[name], self._shapes.values()):
                for reshaped in ([name], same_axes):
                    shapes = self._shapes | dict.fromkeys(reshaped, shape)
                    if self._misfit(shapes) == name and tuple(shapes.items()) not in reported:
                        reported.add(tuple(shapes.items()))
                        label = f"{'_and_'.join(reshaped)}_of_shape_{'_'.join(map(str, shape)) or 'no_axis'}"
                        changes = {n: self._tensor(n, shape) for n in reshaped}
                        yield self.wrong(label, ValueError, name, changes)

    def _other_integers(self) -> Iterator[DeclaredError]:
        """Yield errors for integers out of their range, which only the CPU can detect without waiting."""
        for name, tensor in self._tensors.items():
            arrays: dict[str, np.ndarray] = {}
            if isinstance(tensor, Ragged):
                arrays = _wrong_splits(tensor, self._sizes_of_axes)
            elif tensor.high is not None and not tensor.also:
                low, high = tensor.range(self._sizes_of_axes)
                numbers = {"below": low - 1, "past_the_end": high, "far_away": 2**40}
                arrays = {label: np.full(self._shapes[name], number) for label, number in numbers.items()}
            for label, array in arrays.items():
                stored = array.astype(tensor.dtypes[0])
                if (stored == array).all():
                    yield self.wrong(
                        f"{name}_{label}", ValueError, name, {name: torch.from_numpy(stored)}, devices=("cpu",)
                    )

    def _other_parameters(self) -> Iterator[DeclaredError]:
        for name, parameter in self._parameters.items():
            for label, value in parameter.out_of_range.items():
                yield self.wrong(f"{name}_{label}", ValueError, name, {name: value})
            for label, value in parameter.of_another_type.items():
                yield self.wrong(f"{name}_{label}", TypeError, name, {name: value})

    # ---- shapes

    @cached_property
    def _sizes_of_axes(self) -> dict[str, int]:
        """Return the sizes of the named axes of a valid call."""
        sizes = dict(self._sizes)
        blocks = notation.blocks(tensor.axes for tensor in self._tensors.values())
        for tensor in self._tensors.values():
            for name in notation.names(tensor.axes):
                sizes.setdefault(name, SIZES[len(sizes)] + blocks.get(name, 0))
        return sizes

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        """Return the shapes of the tensors of a valid call."""
        sizes = self._sizes_of_axes
        return {name: notation.shape(tensor.axes, sizes, LEADING) for name, tensor in self._tensors.items()}

    def _misfit(self, shapes: Mapping[str, Shape]) -> str | None:
        """Return the first tensor whose shape does not fit its axes and the earlier tensors; None if all fit."""
        return notation.sizes({name: tensor.axes for name, tensor in self._tensors.items()}, shapes)[1]

    def _tensor(self, name: str, shape: Shape) -> torch.Tensor:
        tensor = self._tensors[name]
        if tensor.is_floating:
            return torch.ones(shape, dtype=getattr(torch, tensor.dtypes[0]) if tensor.dtypes else None)
        if isinstance(tensor, Ragged) and shape == self._shapes[name]:
            return torch.from_numpy(tensor.of_counts(_split(tensor, self._sizes_of_axes)))
        return torch.from_numpy(np.resize(np.array(tensor.example, tensor.dtypes[0]), shape))


class ArgumentsOf(Arguments):
    """The arguments of a valid call, with tensors on the CPU and unknown axes.

    Args:
        call: the arguments, by name.
        dtypes: the floating-point tensors whose dtype is the only valid one.
    """

    def __init__(self, call: Mapping[str, Any], dtypes: Collection[str] = ()) -> None:
        tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
        typed = {name: not v.is_floating_point() or name in dtypes for name, v in tensors.items()}
        kinds = {n: TensorInput(axes=(), dtypes=(name_of(v.dtype),) if typed[n] else ()) for n, v in tensors.items()}
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


def other_shapes(shape: Shape, further: Iterable[Shape]) -> list[Shape]:
    """Return wrong shapes: with an axis more or fewer, with an axis longer, shorter or of 1, and the `further`."""
    shapes = [(), shape[1:], shape[:-1], (1, *shape), (*shape[:-2], *shape[-2:][::-1]), *further]
    for axis, size in enumerate(shape):
        shapes += [(*shape[:axis], length, *shape[axis + 1 :]) for length in (size + 1, size - 1, 1)]
    return [s for s in dict.fromkeys(shapes) if s != shape]


def _split(ragged: Ragged, sizes: Mapping[str, int]) -> np.ndarray:
    """Return the rows of each sample, as equal as they can be."""
    samples, total = sizes[ragged.samples], sizes[ragged.total]
    return np.diff(np.arange(samples + 1) * total // samples)


def _wrong_splits(ragged: Ragged, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return lengths or offsets that do not split the rows of a ragged batch, by their defects."""
    splits = ragged.of_counts(_split(ragged, sizes)).astype(np.int64)
    total = sizes[ragged.total]
    limit = total if ragged.most is None else sizes[ragged.most]

    def change(place: int, number: int) -> np.ndarray:
        copy = splits.copy()
        copy[place] = number
        return copy

    errors = {"not_from_0": change(0, 1), "that_fall": change(-2, total + 1)} if ragged.are_offsets else {}
    errors |= {
        "not_to_the_end": change(-1, splits[-1] - 1),
        "past_the_end": change(-1, splits[-1] + 1),
        "below_0": change(0, -1),
        "far_away": change(-2, 2**40),
    }
    if limit < total:
        counts = np.zeros(sizes[ragged.samples], int)
        counts[-1] = total
        errors["more_than_a_sample_has"] = ragged.of_counts(counts)
    return errors


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
