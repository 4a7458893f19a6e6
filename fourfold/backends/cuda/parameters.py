"""The parameters of compiled kernels, and the conversion of Python arguments to the declared C++ types."""

from __future__ import annotations

import dataclasses
import numbers
import re
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import torch

from fourfold.backends.cuda.declarations import DeclaredKernel

Argument: TypeAlias = torch.Tensor | int | float | bool | None

_SCALARS = {
    *("float", "double", "__half", "__nv_bfloat16", "bool", "char", "signed char", "unsigned char"),
    *("short int", "short unsigned int", "int", "unsigned int", "long int", "long unsigned int"),
    *("long long int", "long long unsigned int"),
}
_INTEGER = re.compile(
    r"(?:(?:signed|unsigned|char|short|int|long)\b ?)+|u?int\d+_t|size_t|ssize_t|ptrdiff_t|u(?:int|long)"
)
_KINDS = {
    **dict.fromkeys(("float", "double"), "f"),
    **dict.fromkeys(("__half", "half"), "h"),
    **dict.fromkeys(("__nv_bfloat16", "nv_bfloat16"), "e"),
    "bool": "b",
    "any of 8 bytes": "?",
    "TensorMap": "m",
}
_HALF_TYPES = {"h": np.dtype(np.float16), "e": np.dtype(ml_dtypes.bfloat16)}
# The types of arguments that are passed unchanged, by kind and size.
_AS_THEY_ARE = {("i", 8): int, ("f", 8): float, ("b", 1): bool}
# By kind and size, the letters of `fourfold.compat.torch_internals.launcher`. The bits of half types are passed.
_LETTERS = {("f", 4): "f", ("f", 8): "d", ("h", 2): "H", ("e", 2): "H", ("b", 1): "B"}
_LETTERS |= {("i", 1): "b", ("i", 2): "h", ("i", 4): "i", ("i", 8): "l"}
_LETTERS |= {("u", 1): "B", ("u", 2): "H", ("u", 4): "I", ("u", 8): "K"}


@dataclasses.dataclass(frozen=True)
class KernelParameter:
    """A kernel's parameter.

    Attributes:
        kind: "P" for a pointer, "p" for a pointer to const, "i" and "u" for a signed and an unsigned integer, "f" for
            float and double, "h" for __half, "e" for __nv_bfloat16, "b" for bool, "?" for an unknown type of 8 bytes,
            "m" for a tensor map, "s" for a type that no argument has.
        size: bytes of the value, or of the element that a pointer points to.
        spelling: the type in C++.
    """

    kind: str
    size: int
    spelling: str

    @classmethod
    def from_type(cls, spelling: str, size: int) -> KernelParameter:
        """Return the parameter whose type has this C++ name and `size` bytes."""
        if spelling.endswith("*"):
            return cls("p" if re.search(r"\bconst\b", spelling) else "P", size, spelling)
        plain = spelling.removeprefix("const ").removeprefix("std::").strip()
        if _INTEGER.fullmatch(plain):
            unsigned = "unsigned" in plain or plain.startswith(("u", "size_t"))
            return cls("u" if unsigned else "i", size, spelling)
        return cls(_KINDS.get(plain, "s"), size, spelling)

    @property
    def is_pointer(self) -> bool:
        """Whether the parameter takes a tensor or None."""
        return self.kind in "pP"

    @property
    def python_type(self) -> type | None:
        """The type of the arguments that are passed unchanged, or None if there is none."""
        return _AS_THEY_ARE.get((self.kind, self.size))

    @property
    def pack_code(self) -> str:
        """The code by which `struct` writes the value into 8 bytes."""
        return {"u": "Q", "f": "d" if self.size == 8 else "f4x"}.get(self.kind, "q")

    @property
    def type_letter(self) -> str | None:
        """The letter of the type in `fourfold.compat.torch_internals.launcher`; None if the launcher cannot pass it."""
        return "O" if self.is_pointer else _LETTERS.get((self.kind, self.size))

    def takes(self, argument: Argument) -> bool:
        """Return whether an argument has the right type. A tensor's dtype and a number's range are not checked."""
        if self.kind == "?":
            return argument is None or type(argument) in (int, float) or isinstance(argument, torch.Tensor)
        if self.is_pointer:
            return argument is None or isinstance(argument, torch.Tensor)
        if self.kind == "m":
            return type(argument).__name__ in ("TensorMapDescriptor", "TensorMapOnCpu")
        if self.kind == "b" or isinstance(argument, bool):
            return self.kind == "b" and isinstance(argument, bool)
        if self.kind in "iu":
            return isinstance(argument, numbers.Integral)
        return self.kind in "fhe" and isinstance(argument, numbers.Real)

    def convert(self, argument: Any) -> int | float | bool:
        """Convert a number to the C++ type: an integer or a float that it can hold, or the bits of a half type.

        Raises:
            OverflowError: the type cannot hold the number.
        """
        if self.kind in "iu":
            number, bits = int(argument), 8 * self.size
            low, high = (0, 1 << bits) if self.kind == "u" else (-1 << (bits - 1), 1 << (bits - 1))
            if not low <= number < high:
                raise OverflowError
            return number
        if self.kind in "he":
            with np.errstate(over="ignore"):
                half = np.array(float(argument)).astype(_HALF_TYPES[self.kind])
            if np.isinf(half) and not np.isinf(float(argument)):
                raise OverflowError
            return int(half.view(np.uint16))
        if self.kind == "f":
            if self.size == 4:
                struct.pack("=f", argument)  # raises where the native "f" gives infinity
            return float(argument)
        return argument

    def for_gpu(self, argument: Any) -> Any:
        """Convert a number so that cuda-core passes as many bytes as the C++ type has."""
        number = self.convert(argument)
        if self.kind == "f" and self.size == 4:
            return np.float32(number)
        return np.uint64(number) if self.kind == "u" else number

    @property
    def element_bytes(self) -> int:
        """The required size of a tensor's elements, or 0 if a divisor of the pointee's size fits, as for float4."""
        pointee = self.spelling.removesuffix("*").replace("const ", "").replace("volatile ", "").strip()
        return self.size if pointee in _SCALARS else 0


class LoadedKernel:
    """A kernel that is loaded on a device, with the parameters of its compiled code.

    Args:
        name: the kernel, a C++ name expression.
        parameters: in order.
        declared: its declaration, which has the parameters' names; None if the source does not show it.
    """

    def __init__(self, name: str, parameters: Sequence[KernelParameter], declared: DeclaredKernel | None) -> None:
        self.name, self.parameters, self._declared = name, tuple(parameters), declared

    def place(self, position: int) -> str:
        """Return a parameter as an error names it: "argument 2 (cols)"."""
        return self._declared.position(position) if self._declared else f"argument {position}"

    def check_count(self, count: int) -> None:
        """Raise TypeError if the kernel gets too many or too few arguments."""
        if count != len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, but {count} were given")

    def mismatch(self, position: int, argument: Argument) -> TypeError:
        """Return the error for an argument that does not fit its parameter."""
        parameter, kind = self.parameters[position], type(argument).__name__
        if isinstance(argument, torch.Tensor):
            kind = f"a tensor of {short(argument.dtype)}"
        hint = "; kernels take pointers and numbers" if parameter.kind == "s" else ""
        return TypeError(
            f"{self.name}: {self.place(position)} is {parameter.spelling} in C++, but {kind} was given{hint}"
        )

    def convert(self, position: int, argument: Any, for_gpu: bool) -> Any:
        """Convert a number to the type of its parameter: see `KernelParameter.convert` and `for_gpu`.

        Raises:
            OverflowError: the type cannot hold the number.
        """
        parameter = self.parameters[position]
        try:
            return parameter.for_gpu(argument) if for_gpu else parameter.convert(argument)
        except OverflowError:
            description = f"{self.place(position)} is {parameter.spelling} in C++, which cannot hold {argument}"
            raise OverflowError(f"{self.name}: {description}") from None


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module."""
    return str(dtype).removeprefix("torch.")
