"""Detection of tampering: a call must not change the functions that judge it, the arrays of its case, or settings.

This module detects tampering; it cannot prevent it, because the candidate runs in the same process. Generated kernels
have been seen to search the interpreter's objects for their references, and to replace the functions that compare.
"""

import builtins
import contextlib
import operator
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fourfold.operations.case import Case

_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    # A call may draw random numbers: that does not change the seed.
    "the seed of torch's random numbers": (torch.initial_seed, torch.manual_seed),
    "NumPy's handling of errors": (np.geterr, lambda handling: np.seterr(**handling)),
}
# The owners of the functions that a call must not replace, and these functions by name.
_watched: list[tuple[Any, dict[str, Any]]] = []
# The same for functions of libraries, from before the first call.
_libraries: list[tuple[Any, dict[str, Any]]] = []


class Tampered(AssertionError):
    """A call changed something by which it is judged."""


def watch(module: ModuleType) -> None:
    """Watch a module that judges: detect calls that replace one of its functions or classes."""
    if module not in watched_modules():
        _watched.append((module, {name: value for name, value in vars(module).items() if callable(value)}))


def watched_modules() -> set[ModuleType]:
    """Return the modules given to `watch`."""
    return {module for module, _ in _watched}


def _library_functions() -> Iterator[tuple[Any, Iterable[str]]]:
    yield np, [name for name, value in vars(np).items() if callable(value) and not name.startswith("_")]
    yield builtins, ("abs", "all", "any", "bool", "float", "isinstance", "len", "max", "min")
    yield torch, ("allclose", "equal", "from_numpy", "isclose", "isnan")
    yield torch.testing, ("assert_close",)
    yield torch.autograd, ("grad",)
    # Functions that time kernels.
    yield torch.cuda, ("synchronize", "Event")
    yield time, ("monotonic", "perf_counter", "perf_counter_ns", "time")
    yield torch.Tensor, ("clone", "contiguous", "cpu", "detach", "equal", "numpy", "view")


def _originals() -> list[tuple[Any, dict[str, Any]]]:
    """Return the owners of the watched functions, and the original functions by name."""
    if not _libraries:
        _libraries.extend(
            (owner, {name: getattr(owner, name) for name in names}) for owner, names in _library_functions()
        )
    return _libraries + _watched


def _replaced_functions(owner: Any, functions: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the original of each function of an owner that is another one now."""
    # A thousand functions are compared around each call: those of modules by a loop in C.
    get = vars(owner).get if isinstance(owner, ModuleType) else lambda name: getattr(owner, name, None)
    if not all(map(operator.is_, map(get, functions), functions.values())):
        yield from ((name, value) for name, value in functions.items() if get(name) is not value)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype inside the block."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


@contextlib.contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the random states of torch, NumPy and Python afterwards."""
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


@contextlib.contextmanager
def nothing_else_changes(case: Case) -> Iterator[None]:
    """Detect what a call inside this context changes outside of its tensors; restore functions and settings.

    Raises:
        Tampered: the call replaced a function that judges it, or changed the arrays of the case or a setting.
    """
    originals = _originals()
    settings = {name: get_value() for name, (get_value, _) in _SETTINGS.items()}
    # Copies as bytes, which a call cannot change in place.
    arrays = {**case.inputs, "grad_output": case.grad_output}
    contents = {name: array.tobytes() for name, array in arrays.items()}
    yield
    changes = [f"changed the {name} of the case" for name, array in arrays.items() if array.tobytes() != contents[name]]
    for owner, functions in originals:
        for name, original in _replaced_functions(owner, functions):
            setattr(owner, name, original)
            changes.append(f"replaced {owner.__name__}.{name}")
    for name, (get_value, set_value) in _SETTINGS.items():
        if get_value() != settings[name]:
            changes.append(f"changed {name} from {settings[name]} to {get_value()}")
            set_value(settings[name])
    if changes:
        raise Tampered(f"the call {', and '.join(changes)}")
