"""The backends: which there are, how an operation's implementation is found, and what one does not support."""

import contextlib
import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

# The module of an operation's folder that holds each backend's implementation.
MODULES = {"torch": "torch_eager", "triton": "triton_kernel", "cuda": "cuda_kernel"}
BACKENDS = tuple(MODULES)


def load(operation: str, backend: str) -> Callable[..., Any]:
    """The public function of an operation on a backend.

    Raises:
        ValueError: the backend is unknown.
        ModuleNotFoundError: the operation has no such implementation.
    """
    if backend not in MODULES:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    return getattr(importlib.import_module(f"impls.{operation}.{MODULES[backend]}"), operation)


def other_order(device: str) -> AbstractContextManager:
    """Within it blocks and threads run in another order than they would, where it is not the device that chooses."""
    if device != "cpu":
        return contextlib.nullcontext()
    from impls import cuda_on_cpu

    return cuda_on_cpu.schedule("reverse")


def has_one_order(backend: str, device: str) -> bool:
    """Whether the programs of a kernel are always run in the same order, one after another."""
    return backend == "triton" and device == "cpu"


def unsupported(operation: str, backend: str, dtype: str, device: str) -> str | None:
    """Why a backend cannot run an operation for a dtype on a device, or None where it can.

    An implementation's module answers for itself with a function ``unsupported(dtype, device)``; what holds for every
    kernel of a backend is answered here.
    """
    if backend == "cuda" and device == "cpu":
        from impls import cuda_on_cpu

        if reason := cuda_on_cpu.unavailable_reason():
            return reason
    if backend == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton runs on the CPU by its interpreter only: set TRITON_INTERPRET=1 before it is imported"
    try:
        return _answer("unsupported", operation, backend, dtype, device)
    except ModuleNotFoundError as error:
        return f"not implemented: {error}"


def depends_on_batch(operation: str, backend: str, dtype: str, device: str) -> str | None:
    """Why the bits of a sample's result may depend on the batch around it, or None where they do not.

    Where a module says nothing it claims that they do not; what they depend on it answers with a function
    ``depends_on_batch(dtype, device)``, in the way of ``unsupported``.
    """
    if backend == "torch":
        return "torch's loops over vectors compute their tails by other instructions"
    return _answer("depends_on_batch", operation, backend, dtype, device)


def offsets_in_32_bits(operation: str, backend: str, dtype: str, device: str) -> str | None:
    """Why offsets of 2^31 and more are too large, or None where they are not.

    In the way of ``unsupported``: where a module does not say so by a function ``offsets_in_32_bits(dtype, device)``
    it claims that they are not.
    """
    return _answer("offsets_in_32_bits", operation, backend, dtype, device)


def _answer(question: str, operation: str, backend: str, dtype: str, device: str) -> str | None:
    module = importlib.import_module(f"impls.{operation}.{MODULES[backend]}")
    answer = getattr(module, question, None)
    return answer(dtype, device) if answer else None
