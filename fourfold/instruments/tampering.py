"""Detection of tampering: a call must not change the functions that judge it, the arrays of its case, or settings.

This module detects tampering; it cannot prevent it, because the candidate runs in the same process. Generated kernels
have been seen to search the interpreter's objects for their references, and to replace the functions that compare.
"""

import builtins
import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fourfold.operations.case import Case

_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    # A call may draw random numbers: that leaves the seed as it is.
    "the seed of torch's random numbers": (torch.initial_seed, torch.manual_seed),
    "NumPy's handling of errors": (np.geterr, lambda handling: np.seterr(**handling)),
}
# The owner, name and value of each function that a call must not replace.
_watched: list[tuple[Any, str, Any]] = []
# The same for functions of libraries, from before the first call.
_libraries: list[tuple[Any, str, Any]] = []


class Tampered(AssertionError):
    """A call changed something by which it is judged."""


def watch(module: ModuleType) -> None:
    """Watch a module that judges: detect calls that replace one of its functions or classes."""
    if module not in watched_modules():
        _watched.extend((module, name, value) for name, value in vars(module).items() if callable(value))


def watched_modules() -> set[ModuleType]:
    """Return the modules given to `watch`."""
    return {module for module, _, _ in _watched}


def _of_libraries() -> Iterator[tuple[Any, str]]:
    yield from ((np, name) for name, value in vars(np).items() if callable(value) and not name.startswith("_"))
    yield from ((builtins, name) for name in ("abs", "all", "any", "bool", "float", "isinstance", "len", "max", "min"))
    yield from ((torch, name) for name in ("allclose", "equal", "from_numpy", "isclose", "isnan"))
    yield from ((torch.testing, "assert_close"), (torch.autograd, "grad"), (torch.cuda, "synchronize"))
    # Functions that time kernels.
    yield from ((time, name) for name in ("monotonic", "perf_counter", "perf_counter_ns", "time"))
    yield (torch.cuda, "Event")
    yield from ((torch.Tensor, name) for name in ("clone", "contiguous", "cpu", "detach", "equal", "numpy", "view"))


def _originals() -> list[tuple[Any, str, Any]]:
    """Return the owner, name and original value of each watched function."""
    if not _libraries:
        _libraries.extend((owner, name, getattr(owner, name)) for owner, name in _of_libraries())
    return _libraries + _watched


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
def random_state_kept() -> Iterator[None]:
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
    settings = {name: get() for name, (get, _) in _SETTINGS.items()}
    # Copies as bytes, which a call cannot change in place.
    arrays = {**case.inputs, "grad_output": case.grad_output}
    held = {name: array.tobytes() for name, array in arrays.items()}
    yield
    found = [f"changed the {name} of the case" for name, array in arrays.items() if array.tobytes() != held[name]]
    for owner, name, original in originals:
        if getattr(owner, name, None) is not original:
            setattr(owner, name, original)
            found.append(f"replaced {owner.__name__}.{name}")
    for name, (get, put) in _SETTINGS.items():
        if get() != settings[name]:
            found.append(f"changed {name} from {settings[name]} to {get()}")
            put(settings[name])
    if found:
        raise Tampered(f"the call {', and '.join(found)}")
