"""Remember what the interpreter has run, so that Triton's compiler can check it: see `front_end`."""

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime import interpreter

# The most launches to remember. A kernel that is created for each call would fill the memory.
MOST = 200


@dataclass(frozen=True)
class Pointer:
    """The argument of a launch in place of a tensor, whose memory it does not keep: what Triton compiles for."""

    dtype: Any

    def data_ptr(self) -> int:
        """Return an address that is a multiple of 16."""
        return 0


@dataclass(frozen=True)
class RememberedLaunch:
    """A launch that has run: the kernel as the interpreter knows it, its arguments and Triton's options."""

    kernel: Any
    arguments: list[Any]
    options: dict[str, Any]


# One launch for each kernel, types of arguments and constants.
known: dict[Hashable, RememberedLaunch] = {}


def _remember(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    constants = constant_names(kernel.fn)
    values = {**dict(zip(kernel.arg_names, arguments)), **options}
    key = kernel, *((name, _kind(value, name in constants)) for name, value in values.items())
    if len(known) < MOST and key not in known:
        plain_options = {name: _strip_memory(value) for name, value in options.items()}
        known[key] = RememberedLaunch(kernel, [_strip_memory(value) for value in arguments], plain_options)


@functools.lru_cache(1024)
def constant_names(function: Callable[..., Any]) -> set[str]:
    """Return the names of a kernel's parameters that are constants.

    Triton looks for "constexpr" in an annotation that is a string, too.
    """
    return {name for name, kind in inspect.get_annotations(function).items() if "constexpr" in str(kind)}


def _kind(value: Any, constant: bool) -> Hashable:
    """Return what Triton compiles for, of an argument: as far as the front end may depend on it."""
    if hasattr(value, "data_ptr"):
        return "pointer", value.dtype
    if isinstance(value, tuple):
        return tuple(_kind(each, constant) for each in value)
    if not constant and isinstance(value, int | float):
        return type(value), value == 1, isinstance(value, int) and not -(2**31) <= value < 2**31
    return type(value), value if isinstance(value, Hashable) else None


def _strip_memory(value: Any) -> Any:
    if hasattr(value, "data_ptr"):
        return Pointer(value.dtype)
    if isinstance(value, tuple):
        parts = [_strip_memory(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(getattr(value, "base", None), torch.Tensor):  # a descriptor
        value = copy.copy(value)
        value.base = Pointer(value.base.dtype)
    return value


def install() -> None:
    """Let the interpreter remember the launches that end without an exception."""
    # On import the compiler takes functions of the language, which the interpreter replaces during a launch.
    importlib.import_module("triton.compiler.code_generator")
    shipped = interpreter.InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        result = shipped(self, *args, grid=grid, warmup=warmup, **kwargs)
        if not warmup:
            _remember(self, args, kwargs)
        return result

    interpreter.InterpretedFunction.run = run
