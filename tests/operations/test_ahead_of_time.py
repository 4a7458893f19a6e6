"""Kernels compile for every architecture that is supported, on a machine that has none of them."""

import importlib
import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

import pytest

from impls.cuda_compile import compile_ahead_of_time
from properties.ahead_of_time import COMMAND, environment, is_for, needs
from properties.cells import Cell
from properties.checks import Subject

# Compute capability, and the most shared memory that a block may have there, in bytes.
TRITON_ARCHITECTURES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
CUDA_ARCHITECTURES = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100a": 227 * 1024}


def record(request: pytest.FixtureRequest, kernels: Iterable[Mapping[str, Any]]) -> None:
    """Keep what the kernels need with the test's report."""
    request.node.user_properties.append(("resources", list(kernels)))


class Compiler:
    """A process that compiles Triton's kernels, which this one cannot where it interprets them.

    It is kept, as what it imports takes longer than a kernel, and made anew after an error.

    Args:
        errors: a file for what it has to say of one.
    """

    def __init__(self, errors: IO[str]) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors = errors

    def compile(self, cell: Cell) -> list[dict[str, Any]]:
        """What the kernels of a cell need on each architecture."""
        if self._process is None:
            self._errors.seek(0)
            self._errors.truncate()
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment(),
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(cell.operation, cell.dtype, *TRITON_ARCHITECTURES, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self.close()
            self._errors.seek(0)
            pytest.fail(f"the kernels do not compile:\n{self._errors.read()}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    with tempfile.TemporaryFile("w+") as errors:
        made = Compiler(errors)
        yield made
        made.close()


@pytest.mark.only(backends=["triton"])
def test_triton_kernels_compile_for_every_architecture(
    cell: Cell, compiler: Compiler, request: pytest.FixtureRequest
) -> None:
    kernels = compiler.compile(cell)
    for capability, most_shared in TRITON_ARCHITECTURES.items():
        compiled = [kernel for kernel in kernels if kernel["arch"] == f"sm_{capability}"]
        # A forward and a backward kernel at the least.
        assert len({kernel["name"] for kernel in compiled}) >= 2
        assert all(kernel["shared_bytes"] <= most_shared for kernel in compiled)
        assert all(kernel["instruction_counts"].get("EXIT") for kernel in compiled)
    record(request, kernels)


@pytest.mark.only(backends=["cuda"])
def test_cuda_kernels_compile_for_every_architecture(
    subject: Subject, cell: Cell, request: pytest.FixtureRequest
) -> None:
    module = importlib.import_module(f"impls.{cell.operation}.cuda_kernel")
    kernels = [kernel for kernel in module.KERNELS if is_for(kernel, cell.dtype)]
    assert kernels, f"{cell.operation} has no CUDA kernel for {cell.dtype}"
    resources = []
    for arch, most_shared in CUDA_ARCHITECTURES.items():
        for source in dict.fromkeys(kernel.source for kernel in kernels):
            names = [kernel.name for kernel in kernels if kernel.source == source]
            for compiled in compile_ahead_of_time(source, names, arch).values():
                assert compiled.shared_bytes <= most_shared
                resources.append(needs(compiled))
    record(request, resources)
