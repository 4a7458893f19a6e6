"""What a call must leave alone beside its inputs: the functions that judge it, the arrays of its case, and settings.

It is found out, not prevented: code in the same process can reach everything. Generated kernels have been seen to look
for their references among the interpreter's objects, and to replace the functions that compare.
"""

import builtins
import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

import oracles
from properties.case import Case

_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "NumPy's handling of errors": (np.geterr, lambda handling: np.seterr(**handling)),
}
_JUDGES = ("comparison", "dtypes", "operation", "running_error", "search", "checks", "laws", "history", "batches")


class Tampered(AssertionError):
    """A call changed what it was judged by."""


def _functions(module: ModuleType) -> Iterator[tuple[Any, str]]:
    return ((module, name) for name, value in vars(module).items() if callable(value) and not name.startswith("_"))


def _watched() -> Iterator[tuple[Any, str]]:
    yield from _functions(np)
    yield from ((builtins, name) for name in ("abs", "all", "any", "bool", "float", "isinstance", "len", "max", "min"))
    yield from ((torch, name) for name in ("allclose", "equal", "from_numpy", "isclose", "isnan"))
    yield from ((torch.testing, "assert_close"), (torch.autograd, "grad"), (torch.cuda, "synchronize"))
    yield from ((torch.Tensor, name) for name in ("clone", "contiguous", "cpu", "detach", "equal", "numpy", "view"))
    for module in pkgutil.iter_modules(oracles.__path__):
        yield from _functions(importlib.import_module(f"oracles.{module.name}"))


_judges: list[tuple[Any, str, Any]] = []


def _originals() -> list[tuple[Any, str, Any]]:
    """Owners, names and values, as they were when first asked for: before any call."""
    if not _judges:
        _judges.extend((owner, name, getattr(owner, name)) for owner, name in _watched())
        for name in _JUDGES:
            module = importlib.import_module(f"properties.{name}")
            _judges.extend((module, n, f) for n, f in vars(module).items() if inspect.isfunction(f))
    return _judges


@contextlib.contextmanager
def nothing_else_changes(case: Case) -> Iterator[None]:
    """Within it a case is called upon; what it changes beside its tensors is put back.

    Raises:
        Tampered: the call replaced a function that judges it, or changed the arrays of the case or a setting.
    """
    originals = _originals()
    settings = {name: get() for name, (get, _) in _SETTINGS.items()}
    # Bytes, which cannot be changed as arrays can.
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
