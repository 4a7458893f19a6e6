"""Load compiled kernels and launch them on tensors in host memory."""

from __future__ import annotations

import array
import contextlib
import contextvars
import ctypes
import functools
import os
import pathlib
import re
import struct
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from fourfold.backends.cuda import declarations
from fourfold.backends.cuda.emulator import build, reached
from fourfold.backends.cuda.emulator.faults import FAULTS, Index
from fourfold.backends.cuda.emulator.tensor_map import TensorMapOnCpu
from fourfold.backends.cuda.parameters import Argument, KernelParameter, LoadedKernel, short

_order = contextvars.ContextVar("order", default=(0, 0))

# A launch is passed as 8-byte words: ten for the launch itself, then one for each of the kernel's parameters.
_HEADER_WORDS = 10
_MODES = ("checked", "fast")


@contextlib.contextmanager
def schedule(order: str | int) -> Iterator[None]:
    """Run the blocks of launches on the CPU, and the threads of each block, in another order.

    A correct kernel gives the same result in any order, up to the rounding of atomic sums.

    Args:
        order: "forward", "reverse", or an int, which is the seed of a shuffle.

    Raises:
        ValueError: order is none of these.
    """
    if isinstance(order, int) and not isinstance(order, bool):
        chosen = (2, order & 0x7FFFFFFFFFFFFFFF)
    elif order in ("forward", "reverse"):
        chosen = (("forward", "reverse").index(order), 0)
    else:
        raise ValueError(f"order must be 'forward', 'reverse' or an int, not {order!r}")
    token = _order.set(chosen)
    try:
        yield
    finally:
        _order.reset(token)


def order() -> str | int:
    """Return the order set by `schedule`, in the form of its argument."""
    kind, seed = _order.get()
    return seed if kind == 2 else ("forward", "reverse")[kind]


def mode() -> str:
    """Return how kernels run on the CPU: $FOURFOLD_CUDA_ON_CPU, which is "checked" (the default) or "fast".

    Raises:
        ValueError: it has any other value.
    """
    name = os.environ.get("FOURFOLD_CUDA_ON_CPU", "checked")
    if name not in _MODES:
        raise ValueError(f"FOURFOLD_CUDA_ON_CPU must be 'checked' or 'fast', not {name!r}")
    return name


class _Fault(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        ("line", ctypes.c_uint),
        ("file", ctypes.c_char_p),
        ("pcs", ctypes.c_size_t * 12),
        ("other_pc", ctypes.c_size_t),
        ("block", ctypes.c_uint * 3),
        ("thread", ctypes.c_uint * 3),
        ("text", ctypes.c_char * 512),
    ]


class _Library:
    def __init__(self, built: build.Built) -> None:
        self.built = built
        # PyDLL holds the GIL during a call, because the runtime's state belongs to one launch at a time.
        self.handle = ctypes.PyDLL(str(built.path))
        self.launch = self.handle.fourfold_launch
        self.launch.restype = ctypes.c_void_p
        self.launch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_double]
        self.handle.fourfold_signature.restype = ctypes.c_char_p
        add_shared = self.handle.fourfold_add_shared
        add_shared.argtypes = [ctypes.c_ssize_t, ctypes.c_longlong, ctypes.c_char_p]
        for variable in built.shared:
            add_shared(variable.offset, variable.size, variable.name.encode())


_library = functools.lru_cache(maxsize=None)(_Library)
# Whether checked kernels are compiled to record which lines ran, and the libraries compiled in this way.
_tracing = [False]
_traced: list[_Library] = []


def trace_lines() -> None:
    """Compile checked kernels from now on so that they record which of their lines ran."""
    _tracing[0] = True


def traces_lines() -> bool:
    """Return whether checked kernels are compiled to record which of their lines ran."""
    return _tracing[0]


def lines_that_ran() -> Iterator[reached.Line]:
    """Yield each line of the kernels compiled since `trace_lines`, and whether it ran."""
    for library in _traced:
        yield from reached.lines(library.built, library.handle.fourfold_reached)


class CpuKernel(LoadedKernel):
    """One kernel compiled for the CPU."""

    def __init__(self, source: pathlib.Path, name: str, also: Collection[str], checked: bool) -> None:
        self._checked = checked
        traced = checked and _tracing[0]
        self._library = _library(build.build(source, name, also, checked, traced))
        if traced and self._library not in _traced:
            _traced.append(self._library)
        self._index = self._library.built.kernels.index(name)
        signature = self._library.handle.fourfold_signature(self._index).decode()
        rows = re.findall(r"^(.) (\d+) .*?\[with T = (.*)\]$", signature, re.MULTILINE)
        parameters = [_parameter(kind, int(size), type_.strip()) for kind, size, type_ in rows]
        super().__init__(name, parameters, declarations.find_declaration(source, name))
        codes = "".join(parameter.pack_code for parameter in self.parameters)
        self._pack: Callable[..., bytes] = struct.Struct(f"={_HEADER_WORDS}q{codes}").pack
        self._expected = [
            (p.is_pointer, p.python_type, p.element_bytes, p.size, int(p.kind == "P")) for p in self.parameters
        ]

    def launch(self, grid: Index, block: Index, shared_bytes: int, args: Sequence[Argument]) -> None:
        """Run the kernel to its end.

        Raises:
            TypeError: the arguments do not fit the kernel's signature.
            KernelFault: the kernel did something undefined.
        """
        self.check_count(len(args))
        values: list[int | float] = []
        views = [0]
        for position, (argument, expected) in enumerate(zip(args, self._expected, strict=True)):
            is_pointer, python_type, element_bytes, pointee_bytes, writable = expected
            if isinstance(argument, torch.Tensor):
                size = argument.element_size()
                if not is_pointer or (size != element_bytes if element_bytes else pointee_bytes % size):
                    raise self.mismatch(position, argument)
                address = argument.data_ptr()
                values.append(address)
                if self._checked:
                    views[0] += 1
                    if argument.is_contiguous():
                        views += (position, address, size, writable, 1, argument.numel(), 1)
                    else:
                        layout = (argument.dim(), *argument.shape, *argument.stride())
                        views += (position, address, size, writable, *layout)
            elif argument is None and is_pointer:
                values.append(0)
            elif isinstance(argument, TensorMapOnCpu) and self.parameters[position].kind == "m":
                values.append(argument.address)
            elif isinstance(argument, int | float) and type(argument) is python_type:
                values.append(argument)
            else:
                values.append(self._number(position, argument))
        if grid[0] * grid[1] * grid[2] >= 1 << 31:
            raise ValueError(f"{self.name}: a grid of {grid} is too large for the CPU")
        try:
            words = self._pack(*grid, *block, shared_bytes, *_order.get(), len(values), *values)
        except struct.error:
            for position, argument in enumerate(args):
                if isinstance(argument, int):
                    self._number(position, argument)
            raise
        address = None
        if self._checked:
            packed = array.array("q", views)
            address = packed.buffer_info()[0]
        limit = float(os.environ.get("FOURFOLD_CUDA_ON_CPU_SECONDS", 120))
        if fault := self._library.launch(self._index, words, address, limit):
            self._raise(_Fault.from_address(fault), args)

    def _number(self, position: int, argument: Argument) -> int | float:
        """Convert an argument other than a tensor to the declared type."""
        if isinstance(argument, torch.Tensor) or argument is None or not self.parameters[position].takes(argument):
            raise self.mismatch(position, argument)
        return self.convert(position, argument, for_gpu=False)

    def _describe(self, position: int, args: Sequence[Argument]) -> str:
        tensor = args[position]
        assert isinstance(tensor, torch.Tensor)
        strides = "" if tensor.is_contiguous() else f" and strides {tuple(tensor.stride())}"
        return f"{self.place(position)}, a {short(tensor.dtype)} tensor of shape {tuple(tensor.shape)}{strides}"

    def _raise(self, fault: _Fault, args: Sequence[Argument]) -> None:
        built = self._library.built
        place: tuple[str | None, int | None] = (None, None)
        if fault.file:
            place = (os.path.realpath(fault.file.decode()), fault.line)
        elif line := build.source_line(built, [pc for pc in fault.pcs if pc]):
            place = line
        other_place = build.source_line(built, [fault.other_pc]) if fault.other_pc else None
        message = fault.text.decode(errors="replace")
        message = message.replace("{other}", f" in line {other_place[1]}" if other_place else "")
        message = re.sub(r"\{argument (\d+)\}", lambda match: self._describe(int(match[1]), args), message)
        raise FAULTS[fault.kind - 1](self.name, *place, tuple(fault.block), tuple(fault.thread), message)


def _parameter(kind: str, size: int, spelling: str) -> KernelParameter:
    """Return the parameter from a line of the kernel's signature, with the compiler's own kind for pointers.

    The compiler knows better than the spelling which pointers point to const.
    """
    parameter = KernelParameter.from_type(spelling, size)
    return KernelParameter(kind, size, spelling) if kind in "pP" else parameter
