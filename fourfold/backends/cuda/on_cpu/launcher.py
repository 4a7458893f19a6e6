"""Load compiled kernels and launch them on tensors in host memory."""

from __future__ import annotations

import array
import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import os
import pathlib
import re
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

import torch

from fourfold.backends.cuda.on_cpu import build
from fourfold.backends.cuda.on_cpu.faults import FAULTS, Index

Argument: TypeAlias = torch.Tensor | int | float | bool | None

_order = contextvars.ContextVar("order", default=(0, 0))

# A launch is passed as 8-byte words: ten for the launch itself, then one for each of the kernel's parameters.
_HEADER_WORDS = 10
_MODES = ("checked", "fast")


@contextlib.contextmanager
def schedule(order: str | int) -> Iterator[None]:
    """Context manager: launches on the CPU run their blocks, and the threads of each block, in another order.

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
        raise ValueError(f"order is {order!r}, which is not 'forward', 'reverse' or an int")
    token = _order.set(chosen)
    try:
        yield
    finally:
        _order.reset(token)


def mode() -> str:
    """How kernels run on the CPU: $FOURFOLD_CUDA_ON_CPU, which is "checked" (the default) or "fast".

    Raises:
        ValueError: it has any other value.
    """
    chosen = os.environ.get("FOURFOLD_CUDA_ON_CPU", "checked")
    if chosen not in _MODES:
        raise ValueError(f"FOURFOLD_CUDA_ON_CPU is {chosen!r}, which is not 'checked' or 'fast'")
    return chosen


_PYTHON_TYPES = {("i", 8): int, ("f", 8): float, ("b", 1): bool}
_SCALARS = {
    *("float", "double", "__half", "__nv_bfloat16", "bool", "char", "signed char", "unsigned char"),
    *("short int", "short unsigned int", "int", "unsigned int", "long int", "long unsigned int"),
    *("long long int", "long long unsigned int"),
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A kernel's parameter.

    Attributes:
        kind: "P" for a pointer, "p" for a pointer to const, "i", "f" or "b" for a number, "?" for an unknown type of
            8 bytes, "m" for a tensor map, "s" for a type that no argument has.
        size: bytes of the value, or of the element that a pointer points to.
        spelling: the type in C++.
    """

    kind: str
    size: int
    spelling: str

    @classmethod
    def of_type(cls, spelling: str, size: int) -> Parameter:
        """The parameter whose type has this C++ name and `size` bytes."""
        if spelling.endswith("*"):
            return cls("p" if "const" in spelling else "P", size, spelling)
        kinds = {"long long": "i", "long": "i", "double": "f", "bool": "b", "any of 8 bytes": "?", "TensorMap": "m"}
        return cls(kinds.get(spelling, "s"), size, spelling)

    @property
    def is_pointer(self) -> bool:
        """Whether the parameter takes a tensor or None."""
        return self.kind in "pP"

    @property
    def python_type(self) -> type | None:
        """The Python type of the numbers that the parameter takes, or None."""
        return _PYTHON_TYPES.get((self.kind, self.size))

    def takes(self, argument: Argument) -> bool:
        """Whether an argument has the right type. A tensor's dtype is not checked here."""
        if self.kind == "?":
            return argument is None or type(argument) in (int, float) or isinstance(argument, torch.Tensor)
        if self.is_pointer:
            return argument is None or isinstance(argument, torch.Tensor)
        if self.kind == "m":
            return type(argument).__name__ == "TensorMapDescriptor"
        return type(argument) is self.python_type

    @property
    def element_bytes(self) -> int:
        """The required size of a tensor's elements, or 0 if a divisor of the pointee's size fits, as for float4."""
        pointee = self.spelling.removesuffix("*").replace("const ", "").replace("volatile ", "").strip()
        return self.size if pointee in _SCALARS else 0


def check_count(name: str, parameters: int, given: int) -> None:
    """Raise TypeError if a kernel gets too many or too few arguments."""
    if given != parameters:
        raise TypeError(f"{name} takes {parameters} arguments, but {given} were given")


def mismatch(name: str, position: int, parameter: Parameter, argument: Argument) -> TypeError:
    """The error for an argument that does not fit its parameter."""
    given = type(argument).__name__
    if isinstance(argument, torch.Tensor):
        given = f"a tensor of {_short(argument.dtype)}"
    none_fits = not parameter.is_pointer and parameter.kind != "?" and parameter.python_type is None
    hint = "; kernels take pointers, long long, double and bool" if none_fits else ""
    return TypeError(f"{name}: argument {position} is {parameter.spelling} in C++, but {given} was given{hint}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


class CpuKernel:
    """One kernel compiled for the CPU."""

    def __init__(self, source: pathlib.Path, name: str, also: Collection[str], checked: bool) -> None:
        self.name = name
        self._checked = checked
        self._library = _library(build.build(source, name, also, checked))
        self._index = self._library.built.kernels.index(name)
        signature = self._library.handle.fourfold_signature(self._index).decode()
        rows = re.findall(r"^(.) (\d+) .*?\[with T = (.*)\]$", signature, re.MULTILINE)
        self.parameters = tuple(Parameter(kind, int(size), type_.strip()) for kind, size, type_ in rows)
        codes = "".join("d" if p.kind == "f" else "q" for p in self.parameters)
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
        check_count(self.name, len(self._expected), len(args))
        values: list[int | float] = []
        views = [0]
        for position, (argument, expected) in enumerate(zip(args, self._expected, strict=True)):
            is_pointer, python_type, element_bytes, pointee_bytes, writable = expected
            if isinstance(argument, torch.Tensor):
                size = argument.element_size()
                if not is_pointer or (size != element_bytes if element_bytes else pointee_bytes % size):
                    raise mismatch(self.name, position, self.parameters[position], argument)
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
            elif isinstance(argument, int | float) and type(argument) is python_type:
                values.append(argument)
            else:
                raise mismatch(self.name, position, self.parameters[position], argument)
        if grid[0] * grid[1] * grid[2] >= 1 << 31:
            raise ValueError(f"{self.name}: a grid of {grid} is too large for the CPU")
        try:
            words = self._pack(*grid, *block, shared_bytes, *_order.get(), len(values), *values)
        except struct.error:
            raise OverflowError(f"{self.name}: an integer argument does not fit a long long: {values}") from None
        address = None
        if self._checked:
            packed = array.array("q", views)
            address = packed.buffer_info()[0]
        limit = float(os.environ.get("FOURFOLD_CUDA_ON_CPU_SECONDS", 120))
        if fault := self._library.launch(self._index, words, address, limit):
            self._raise(_Fault.from_address(fault), args)

    def _raise(self, fault: _Fault, args: Sequence[Argument]) -> None:
        built = self._library.built
        place: tuple[str | None, int | None] = (None, None)
        if fault.file:
            place = (os.path.realpath(fault.file.decode()), fault.line)
        elif found := build.source_line(built, [pc for pc in fault.pcs if pc]):
            place = found
        other = build.source_line(built, [fault.other_pc]) if fault.other_pc else None
        what = fault.text.decode(errors="replace")
        what = what.replace("{other}", f" in line {other[1]}" if other else "")
        what = re.sub(r"\{argument (\d+)\}", lambda match: _described(int(match[1]), args), what)
        raise FAULTS[fault.kind - 1](self.name, *place, tuple(fault.block), tuple(fault.thread), what)


def _described(position: int, args: Sequence[Argument]) -> str:
    tensor = args[position]
    assert isinstance(tensor, torch.Tensor)
    strides = "" if tensor.is_contiguous() else f" and strides {tuple(tensor.stride())}"
    return f"argument {position} (a {_short(tensor.dtype)} tensor of shape {tuple(tensor.shape)}{strides})"
