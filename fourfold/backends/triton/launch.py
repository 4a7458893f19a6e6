"""Helpers for Triton launches: the launch itself, the current device, and the types that kernels compute in."""

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fourfold.backends import known_calls, launch_records
from fourfold.backends.launch import multiprocessors as multiprocessors
from fourfold.backends.triton import contract as triton_contract
from fourfold.compat import torch_internals, triton_internals

# The type in which a kernel computes, by the dtype of its tensors; also the type of partial sums between programs.
COMPUTE = {torch.float16: tl.float32, torch.bfloat16: tl.float32, torch.float32: tl.float32, torch.float64: tl.float64}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_LEFT_TO_TRITON = INTERPRETED or not triton_internals.KNOWS_LAUNCHES

_Scalars = tuple[int | float | bool, ...]
_SCALAR_TYPES = frozenset((int, float, bool))
# The number of addresses for which a repeated launch keeps a descriptor.
_MOST_ADDRESSES = 64
# By the key of a launch: Triton's compiled kernel, and the kernel's constants.
_compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
# By a kernel's id: the kernel, kept alive so that its id stays unique, and the scalars that Triton compiles for.
_kernels: dict[int, tuple[Any, tuple[int, ...]]] = {}


class _Base:
    """A tensor's memory as the base of a `TensorDescriptor`, which is not kept alive."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return self._address


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[torch.Tensor | TensorDescriptor, ...],
    scalars: _Scalars,
    **options: Any,
) -> None:
    """Run ``kernel[grid](*tensors, *scalars, **options)`` on the tensors' device with less host overhead.

    Triton looks up a compiled kernel in some 15 us per launch, more than a small loss takes on the device. Here a
    launch is recognized by the properties that Triton compiles for: see `launch_key`. If Triton compiles for other
    properties, too, as a future version may, no launch is recognized, and Triton performs every launch.

    Args:
        kernel: a `triton.jit` function.
        grid: the number of programs along one to three axes.
        tensors: the kernel's first arguments, or their descriptors.
        scalars: the arguments after them.
        options: the `tl.constexpr` arguments, and Triton's launch options such as num_warps.
    """
    first = _memory(tensors[0])
    device = first.get_device()
    recorder = known_calls.recorder()
    if device < 0 or _LEFT_TO_TRITON:
        if recorder is not None:
            recorder.refuse()
        with current_device(first.device):
            kernel[grid](*tensors, *scalars, **options)
        return
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, tensors, scalars, **options)
        return
    key = launch_key(kernel, device, tensors, scalars, options)
    launchable = None if key is None else _compiled.get(key)
    if launchable is not None:
        compiled, constants = launchable
        stream = torch_internals.current_stream(device)
        triton_internals.launch_compiled(compiled, (*grid, 1, 1)[:3], (*tensors, *scalars, *constants), stream)
        if (record := launch_records.current) is not None:
            _record(record, compiled, grid, (*tensors, *scalars))
        if recorder is not None:
            places = [(i, recorder.place_of_number(scalar)) for i, scalar in enumerate(scalars)]
            numbers = [(i, place) for i, place in places if place is not None]
            recorder.record_launch(_again(compiled, (*grid, 1, 1)[:3], tensors, (*scalars, *constants), numbers))
        return
    if recorder is not None:
        recorder.refuse()
    compiled = kernel[grid](*tensors, *scalars, **options)
    options_of_kernel = triton_internals.parameters(kernel)[len(tensors) + len(scalars) :]
    all_named = all(parameter.is_constexpr and parameter.name in options for parameter in options_of_kernel)
    if key is not None and all_named and not unkeyed_properties(device):
        _compiled[key] = compiled, tuple(options[parameter.name] for parameter in options_of_kernel)


def _memory(tensor: torch.Tensor | TensorDescriptor) -> torch.Tensor:
    return tensor.base if type(tensor) is TensorDescriptor else tensor


def _record(
    record: launch_records.LaunchRecord, compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]
) -> None:
    code, shape = triton_internals.code_of(compiled), triton_internals.shape_of(compiled)
    clusters = f", clusters of {shape.blocks_per_program}" if shape.blocks_per_program != 1 else ""
    options = "".join(f", {option}" for option in shape.options)
    record.record_launch(
        launch_records.Code(code.name, code.name, shape.arch, code.cubin),
        f"grid {(*grid, 1, 1)[:3]}, block {(shape.threads, 1, 1)}, {shape.shared_bytes} bytes{clusters}{options}",
        [[*vars(x).values()] if type(x) is TensorDescriptor else x for x in arguments],
    )


@contextlib.contextmanager
def record_triton_launches(record: launch_records.LaunchRecord) -> Iterator[None]:
    """Record the launches that Triton itself makes, of any kernel. `launch` records the others."""

    def run(shipped: Callable[..., Any], kernel: Any, *arguments: Any, **options: Any) -> Any:
        given_grid = options.pop("grid")
        grid = () if callable(given_grid) else tuple(given_grid or ())

        def grid_of(bound: Mapping[str, Any]) -> tuple[int, ...]:
            nonlocal grid
            grid = tuple(given_grid(bound))
            return grid

        compiled = shipped(kernel, *arguments, grid=grid_of if callable(given_grid) else given_grid, **options)
        if options.get("warmup"):
            return compiled
        if not grid or compiled is None:
            record.refuse(f"the grid of {kernel.__name__} is not known")
            return compiled
        names = [parameter.name for parameter in triton_internals.parameters(kernel)]
        constants = {parameter.name for parameter in triton_internals.parameters(kernel) if parameter.is_constexpr}
        values = {**dict(zip(names, arguments)), **{name: options[name] for name in names if name in options}}
        passed = [values[name] for name in names if name in values and name not in constants]
        _record(record, compiled, grid, passed)
        return compiled

    with triton_internals.launches_replaced(run):
        yield


def _again(
    compiled: Any,
    grid: tuple[int, ...],
    tensors: tuple[torch.Tensor | TensorDescriptor, ...],
    others: tuple[Any, ...],
    numbers: list[tuple[int, int]],
) -> Callable[[known_calls.CallPlaces], known_calls.Launch]:
    """Return a launch for `known_calls`, which passes these tensors and other arguments.

    `numbers` holds the position of each number in which calls of a kind may differ among `others`, and the place of its
    value.
    """

    def again(places: known_calls.CallPlaces) -> known_calls.Launch:
        at = dict(numbers)
        taken = [places.find_address(_memory(tensor).data_ptr()) for tensor in tensors]
        taken += [at[i] if i in at else places.add_constant(other) for i, other in enumerate(others)]
        described = {i: _descriptors_like(x) for i, x in enumerate(tensors) if type(x) is TensorDescriptor}
        arguments = known_calls.arguments_at(taken, described)
        launch = triton_internals.relauncher(compiled, grid)
        entry, shape = triton_internals.entry_of(compiled), triton_internals.shape_of(compiled)
        block = shape.threads, 1, 1
        direct = entry and torch_internals.launcher(entry.handle, grid, block, shape.shared_bytes, entry.types)
        if entry is None or direct is None:
            return lambda values, stream: launch(arguments(values), stream)
        null, is_hooked = places.add_constant(0), triton_internals.hook_check()
        passed = known_calls.arguments_at([*(taken[i] for i in entry.passed), null, null], {})

        def launch_again(values: Sequence[Any], stream: int) -> None:
            if is_hooked():
                launch(arguments(values), stream)
            else:
                direct(passed(values), stream)

        return launch_again

    return again


def _descriptors_like(descriptor: TensorDescriptor) -> Callable[[int], TensorDescriptor]:
    """Return the function from an address to a descriptor like this one, of the memory there."""
    like = copy.copy(descriptor)
    like.base = None

    @functools.lru_cache(maxsize=_MOST_ADDRESSES)
    def descriptor_at(address: int) -> TensorDescriptor:
        moved = copy.copy(like)
        moved.base = _Base(address)
        return moved

    return descriptor_at


def launch_key(
    kernel: Any, device: int, tensors: tuple[Any, ...], scalars: tuple[Any, ...], options: Mapping[str, Any]
) -> Hashable:
    """Return the key by which a launch is recognized, or None for a launch that is left to Triton.

    It contains the properties that Triton compiles for: the tensors' dtypes and alignment, the dtypes, blocks and
    options of descriptors, the scalars' types, which integers need 64 bits, are 1 or multiples of 16, and the options.
    Launches with larger integers, or with arguments other than these and numbers, are left to Triton.
    """
    types: list[Hashable] = [*map(type, scalars)]
    if not _SCALAR_TYPES.issuperset(types):
        return None
    for i, scalar in enumerate(scalars):
        if types[i] is int and not -(2**31) <= scalar < 2**31:
            if not -(2**63) <= scalar < 2**63:
                return None
            types[i] = "64 bits"
    forms: list[Hashable] = []
    for tensor in tensors:
        if tensor is None:
            return None
        if type(tensor) is TensorDescriptor:
            base, _, _, *others = vars(tensor).values()
            forms += base.dtype, str(others)
        else:
            forms += tensor.dtype, tensor.data_ptr() % 16 == 0
    number = id(kernel)
    if number not in _kernels:
        parameters = enumerate(triton_internals.parameters(kernel)[len(tensors) :][: len(scalars)])
        _kernels[number] = kernel, tuple(i for i, parameter in parameters if not parameter.do_not_specialize)
    return (
        number,
        device,
        *forms,
        # 1, 1.0 and True are equal, and different types to Triton.
        *types,
        *[(scalars[i] == 1, scalars[i] % 16 == 0) for i in _kernels[number][1]],
        *options,
        *options.values(),
        *map(type, options.values()),
    )


@functools.cache
def unkeyed_properties(device: int) -> tuple[str, ...]:
    """Describe properties that Triton compiles for on a GPU and `launch_key` does not distinguish: none are known."""
    return tuple(triton_contract.key_collisions(launch_key, device))


def current_device(device: torch.device) -> AbstractContextManager:
    """Make a tensor's device the current one, where Triton launches. It is free if it already is."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def index_type(rows: int) -> tl.dtype:
    """Return the integer type that holds row numbers up to `rows`. Offsets in elements always take 64 bits."""
    return tl.int32 if rows < 2**31 else tl.int64


if INTERPRETED:
    from fourfold.backends.triton.interpreter import corrections as triton_interpreter

    triton_interpreter.install()
