"""Triton kernels compiled for GPUs that are not there: the same calls, the same specialisations, and no launch."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Collection, Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from impls import triton_launch
from impls.cuda_compile import KernelResources, resources_of_cubin


class _Absent:
    """What Triton asks its driver, answered for a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device: each architecture is one.
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiled_for(capability: int, but: Collection[str] = ()) -> Iterator[list[KernelResources]]:
    """Within it, calls of Triton implementations on CPU tensors compile their kernels and do not run them.

    What the calls return has the right shape and was never written.

    Args:
        capability: 80, 90 or 100, say.
        but: names of kernels that are left out.

    Yields:
        A list that grows by each kernel that was compiled, with what it needs there.

    Raises:
        RuntimeError: in a process that interprets kernels, where there is nothing to compile.
    """
    if triton_launch.INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: kernels of this process cannot be compiled")
    found: list[KernelResources] = []
    seen: set[str] = set()
    shipped_run = triton.runtime.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self.__name__ in but:
            return None
        kernel = shipped_run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            with tempfile.TemporaryDirectory() as directory:
                cubin = pathlib.Path(directory, f"{kernel.hash}.cubin")
                cubin.write_bytes(kernel.asm["cubin"])
                found.append(resources_of_cubin(cubin, kernel.metadata.name, f"sm_{capability}"))
        return kernel

    before = driver._active  # not active, which looks for a GPU
    driver.set_active(_Absent(capability))
    triton.runtime.JITFunction.run = run
    try:
        yield found
    finally:
        triton.runtime.JITFunction.run = shipped_run
        driver._active = before
