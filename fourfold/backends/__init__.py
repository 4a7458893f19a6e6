"""The backends: their names, how to load an operation's implementation, and what a backend does not support."""

import contextlib
import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from fourfold.operations import registry

# For each backend, the module in an operation's folder that holds its implementation.
MODULES = {"torch": "torch_eager", "triton": "triton_kernel", "cuda": "cuda_kernel"}
BACKENDS = tuple(MODULES)


def load(operation: str, backend: str) -> Callable[..., Any]:
    """Return the public function of an operation on a backend.

    Raises:
        ValueError: the backend is unknown.
        ModuleNotFoundError: the operation has no such implementation.
    """
    if backend not in MODULES:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    return getattr(module(operation, backend), operation.partition(".")[0])


def module(operation: str, backend: str) -> ModuleType:
    """Return the module that holds an operation's implementation on a backend.

    Raises:
        ModuleNotFoundError: the operation has no such implementation.
    """
    operation = operation.partition(".")[0]
    return importlib.import_module(f"{registry.implementations(operation)}.{MODULES[backend]}")


def other_order(device: str) -> AbstractContextManager:
    """Run the blocks and threads of kernels in reverse order. It has no effect on a GPU."""
    if device != "cpu":
        return contextlib.nullcontext()
    from fourfold.backends.cuda import emulator as cuda_on_cpu

    return cuda_on_cpu.schedule("reverse")


def has_one_order(backend: str, device: str) -> bool:
    """Return whether the backend always runs the programs of a kernel one after another in the same order."""
    return backend == "triton" and device == "cpu"


def unsupported(operation: str, backend: str, dtype: str, device: str) -> str | None:
    """Return the reason why a backend cannot run an operation for a dtype on a device, or None if it can.

    Reasons that hold for every kernel of a backend are given here. An implementation's module gives its own with an
    optional function ``unsupported(dtype, device)``.
    """
    if backend == "cuda" and device == "cpu":
        from fourfold.backends.cuda import emulator as cuda_on_cpu

        if reason := cuda_on_cpu.unavailable_reason():
            return reason
    if backend == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton on the CPU needs its interpreter: set TRITON_INTERPRET=1 before triton is imported"
    try:
        return _answer("unsupported", operation, backend, dtype, device)
    except ModuleNotFoundError as error:
        return f"not implemented: {error}"


def depends_on_batch(operation: str, backend: str, dtype: str, device: str) -> str | None:
    """Return the reason why the bits of a sample's result may depend on the rest of the batch, or None if they do not.

    An implementation's module gives the reason with an optional function ``depends_on_batch(dtype, device)``. Without
    that function it claims that the bits do not depend on the batch.
    """
    if backend == "torch":
        return "torch's vectorized loops compute their tails with other instructions"
    return _answer("depends_on_batch", operation, backend, dtype, device)


def offsets_in_32_bits(operation: str, backend: str, dtype: str, device: str) -> str | None:
    """Return the reason why an implementation cannot handle offsets of 2^31 and more, or None if it can.

    An implementation's module gives the reason with an optional function ``offsets_in_32_bits(dtype, device)``. Without
    that function it claims that it handles them.
    """
    return _answer("offsets_in_32_bits", operation, backend, dtype, device)


def _answer(question: str, operation: str, backend: str, dtype: str, device: str) -> str | None:
    answer = getattr(module(operation, backend), question, None)
    return answer(dtype, device) if answer else None
