"""Compile Triton kernels for a GPU that is absent: the same calls and specializations, but no launch."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from fourfold.backends.cuda.compile import KernelResources, resources_of_cubin
from fourfold.backends.triton import launch as triton_launch
from fourfold.compat import triton_internals


class CompiledSummary(NamedTuple):
    """The name, architecture and shared memory of a compiled kernel, which need no disassembly."""

    name: str
    arch: str
    shared_bytes: int


@contextlib.contextmanager
def compile_launches(
    capability: int, excluded: Collection[str] = (), disassembled: bool = True
) -> Iterator[list[KernelResources | CompiledSummary]]:
    """Compile the kernels of Triton implementations that are called on CPU tensors, without running them.

    The results of such calls have the right shape, but their memory is uninitialised.

    Args:
        capability: the compute capability times 10, such as 80, 90 or 100.
        excluded: names of kernels to skip.
        disassembled: whether to report each kernel's resources, from its machine code. This takes as long as compiling.

    Yields:
        A list to which each newly compiled kernel appends its resources.

    Raises:
        RuntimeError: TRITON_INTERPRET=1, so this process cannot compile kernels.
    """
    if triton_launch.INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: kernels of this process cannot be compiled")
    results: list[KernelResources | CompiledSummary] = []
    digests: set[str] = set()

    def run(shipped: Callable[..., Any], kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        if kernel.__name__ in excluded:
            return None
        compiled = shipped(kernel, *args, warmup=True, **kwargs)
        code = triton_internals.code_of(compiled)
        if code.digest in digests:
            return compiled
        digests.add(code.digest)
        if not disassembled:
            results.append(CompiledSummary(code.name, f"sm_{capability}", compiled.metadata.shared))
        else:
            with tempfile.TemporaryDirectory() as directory:
                cubin = pathlib.Path(directory, f"{code.digest}.cubin")
                cubin.write_bytes(code.cubin)
                results.append(resources_of_cubin(cubin, code.name, f"sm_{capability}"))
        return compiled

    absent = triton_internals.AbsentDriver(capability)
    with triton_internals.driver_replaced(absent), triton_internals.launches_replaced(run):
        yield results
