"""Supply the interpreter with NVIDIA's libdevice functions, which kernels call as ``libdevice.tanh(x)``.

As shipped, the interpreter has none of them. Their names are those of the CUDA Math API.
"""

import functools
import importlib
import math
import re
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from fourfold.backends.triton.interpreter.arithmetic import Handle, fused_multiply_add, numpy_type
from fourfold.operations.blame import Lack


def _vectorize(function: Callable[..., float]) -> Callable[..., np.ndarray]:
    """Vectorize a function of Python's math; if it raises, the result is NaN, or infinite on overflow."""

    def guarded(*numbers: float) -> float:
        try:
            return function(*numbers)
        except OverflowError:
            return math.inf
        except ValueError:
            return math.nan

    return np.vectorize(guarded, otypes=[np.float64])


def _round(x: Any) -> Any:
    """Round to the nearest integer, halves away from 0."""
    return np.trunc(x + np.copysign(np.where(np.abs(x) < 2.0**51, 0.5, 0.0), x))


# The functions that have the same names in NumPy, and the inverse ones, whose names there begin with "arc".
_AS_IN_NUMPY = (
    *("abs", "add", "cbrt", "ceil", "copysign", "cos", "cosh", "exp", "exp2", "expm1", "fabs"),
    *("floor", "fmax", "fmin", "fmod", "hypot", "isinf", "isnan", "ldexp", "log", "log10", "log1p"),
    *("log2", "nextafter", "rint", "signbit", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
_INVERSE = ("cos", "cosh", "sin", "sinh", "tan", "tan2", "tanh")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _AS_IN_NUMPY},
    **{f"a{name}": getattr(np, f"arc{name}") for name in _INVERSE},
    "cospi": lambda x: np.cos(np.pi * np.fmod(x, 2)),
    "erf": _vectorize(math.erf),
    "erfc": _vectorize(math.erfc),
    "exp10": lambda x: np.power(10.0, x),
    "fdim": lambda x, y: np.maximum(x - y, 0),
    "finite": np.isfinite,
    "isfinited": np.isfinite,
    "fma": lambda x, y, z: fused_multiply_add(x, y, z, "fp64" if z.dtype == np.float64 else "fp32"),
    "lgamma": _vectorize(math.lgamma),
    "llabs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "nearbyint": np.rint,
    "normcdf": _vectorize(lambda x: math.erfc(-x / math.sqrt(2)) / 2),
    "pow": np.power,
    "powi": np.power,
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "rcp": lambda x: 1 / x,
    "remainder": _vectorize(math.remainder),
    "rhypot": lambda x, y: 1 / np.hypot(x, y),
    "llrint": np.rint,
    "round": _round,
    "llround": _round,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "saturate": lambda x: np.clip(np.nan_to_num(x, nan=0.0), 0, 1),
    "sinpi": lambda x: np.sin(np.pi * np.fmod(x, 2)),
    "tgamma": _vectorize(math.gamma),
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fdivide": np.divide,
}
# Of a conversion, ``__nv_float2int_rn``: how it rounds.
_ROUNDINGS = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
_CONVERSION = re.compile(r"(?:float|double|u?int|u?ll|half)2(?:float|double|u?int|u?ll|half)(?:_(r[nzdu]))?$")


@functools.cache
def function_of(symbol: str) -> Callable[..., Any]:
    """Return the NumPy implementation of a function of libdevice.

    Args:
        symbol: its name in the library, like ``__nv_tanhf``.

    Raises:
        Lack: it is unknown here.
    """
    name = symbol.removeprefix("__nv_")
    conversion = _CONVERSION.match(name)
    if conversion:
        rounding = _ROUNDINGS.get(conversion[1] or "", lambda x: x)
        return lambda x: rounding(x) if x.dtype.kind == "f" and "2float" not in name and "2double" not in name else x
    name = re.sub(r"_(r[nzdu])$", "", re.sub(r"^(fast_|f?(?=(add|sub|mul|div|sqrt|rcp|fma)_r))", "", name))
    for candidate in (name, name.removesuffix("f"), re.sub(r"^[df](?=add|sub|mul|div|sqrt|rcp)", "", name)):
        if candidate in FUNCTIONS:
            return FUNCTIONS[candidate]
    for kind in ("ullmax", "llmax", "umax", "ullmin", "llmin", "umin"):
        if name == kind:
            return FUNCTIONS[kind[-3:]]
    if re.match(r"is(inf|nan)", name):
        return FUNCTIONS[name[:5]]
    if name.startswith("signbit"):
        return np.signbit
    raise Lack(f"the interpreter has no function {symbol} of libdevice")


class Functions(interpreter.InterpreterBuilder):
    """Calls of libdevice."""

    def create_extern_elementwise(
        self, libName: str, libPath: str, symbol: str, argList: list[Any], retType: Any, isPure: bool
    ) -> Handle:
        """Apply a function of a library element by element."""
        result = function_of(symbol)(*(argument.data for argument in argList))
        return Handle(np.asarray(result).astype(numpy_type(retType)), retType.scalar)


def install() -> None:
    """Let kernels call libdevice's functions by any name that a release of Triton has given them."""
    library = importlib.import_module("triton.language.extra.cuda.libdevice")
    generic = importlib.import_module("triton.language.extra.libdevice")
    for name, member in list(vars(library).items()):
        if tl.core.is_builtin(member):
            call = functools.partial(_call, member.__wrapped__)
            _lead(member, call)
            if isinstance(shipped := vars(generic).get(name), FunctionType):
                _lead(shipped, call)
            else:
                setattr(generic, name, member)
            for module in (tl.math, getattr(tl, "libdevice", None)):
                if isinstance(module, ModuleType) and not hasattr(module, name):
                    setattr(module, name, member)
    if not hasattr(tl, "libdevice"):
        tl.libdevice = library
    # Hints about the launch that follows, which starts when this one is over.
    for name in ("gdc_wait", "gdc_launch_dependents"):
        if hasattr(tl.extra.cuda, name):
            setattr(tl.extra.cuda, name, lambda: None)


def _lead(shipped: FunctionType, call: Callable[..., Any]) -> None:
    """Let a function of Triton's make a call of ours: a kernel's module may have imported it by its name already."""

    def without_cells(*args: Any, _call: Any = None, **options: Any) -> Any:
        return _call(*args, **options)

    def with_a_cell(*args: Any, _call: Any = None, **options: Any) -> Any:
        _ = shipped
        return _call(*args, **options)

    # Python demands that the new code has as many cells as the old.
    shipped.__code__ = (with_a_cell if shipped.__closure__ else without_cells).__code__
    shipped.__kwdefaults__ = {"_call": call}


def _call(member: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function of Triton's library.

    Raises:
        ValueError: it has no implementation for these types. Triton raises a KeyError, which the compiler wraps.
    """
    try:
        return member(*args, **{"_semantic": interpreter.interpreter_semantic, **options})
    except KeyError as error:
        raise ValueError(f"libdevice.{member.__name__} takes no arguments of the types {error}") from None
