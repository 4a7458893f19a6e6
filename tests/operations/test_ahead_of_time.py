"""Kernels compile for every supported architecture, on a machine without any of them."""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from fourfold import backends
from fourfold.backends.cuda.compile import compile_kernels, kernel_log, static_shared_bytes
from fourfold.checks.ahead_of_time import COMMAND, COMPILE_ONLY, environment, is_for
from fourfold.checks.search import Subject
from fourfold.engine.cells import Cell
from fourfold.engine.profiles import is_full
from fourfold.mutation.triton_mutants import triton_functions
from fourfold.pytest_plugin.failures import SELECTION

# The most shared memory that a block may have, in bytes, by compute capability.
MOST_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# NVRTC's names of the architectures, with the instructions that only they have.
CUDA_ARCHITECTURES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
# A plain run compiles for one dtype and one architecture.
PLAIN = {"float16": (90,)}


def architectures(cell: Cell) -> tuple[int, ...]:
    """Return the architectures that a cell is compiled for: one in a plain run."""
    return tuple(CUDA_ARCHITECTURES) if is_full() else PLAIN.get(cell.dtype, (90,))


def other_operations(config: pytest.Config, cell: Cell) -> set[str]:
    """Return the operations that this run compiles beside a cell's, for the same backend and dtype."""
    cells = config.stash[SELECTION].cells
    chosen = {each.operation for each in cells if (each.backend, each.dtype) == (cell.backend, cell.dtype)}
    return chosen - {cell.operation}


class Compiler:
    """A process that compiles Triton's kernels, which this process cannot if it interprets them.

    The process is kept, because its imports take longer than a kernel. After an error a new one is started.

    Args:
        errors: a file for the error output of the process.
    """

    def __init__(self, errors: IO[str]) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors = errors

    def compile(self, cell: Cell) -> list[dict[str, Any]]:
        """Compile the kernels of a cell; return their resources on each architecture."""
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
        print(cell.operation, cell.dtype, *architectures(cell), COMPILE_ONLY, file=self._process.stdin, flush=True)
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


@pytest.mark.only(backends=["triton"], plain=PLAIN)
def test_triton_kernels_compile_for_every_architecture(
    cell: Cell, compiler: Compiler, device: str, pytestconfig: pytest.Config
) -> None:
    # Without the subject, which a machine without a GPU need not be able to run.
    if reason := backends.unsupported(cell.operation, cell.backend, cell.dtype, device):
        pytest.skip(reason)
    *_, owner, _ = backends.load(cell.operation, "triton").__module__.split(".")
    if owner in other_operations(pytestconfig, cell):
        pytest.skip(f"its kernels are those of {owner}, and compiled there")
    kernels = compiler.compile(cell)
    source = Path(backends.module(cell.operation, "triton").__file__ or "")
    written = [name for name, _, _ in triton_functions(source.read_text()) if name.endswith("_kernel")]
    for capability in architectures(cell):
        compiled = [kernel for kernel in kernels if kernel["arch"] == f"sm_{capability}"]
        # At least a forward and a backward kernel, unless one serves for both.
        assert len({kernel["name"] for kernel in compiled}) >= max(1, min(2, len(written)))
        assert all(kernel["shared_bytes"] <= MOST_SHARED_BYTES[capability] for kernel in compiled)


@pytest.mark.only(backends=["cuda"], whole=True, plain=PLAIN)
def test_cuda_kernels_compile_for_every_architecture(subject: Subject, cell: Cell, pytestconfig: pytest.Config) -> None:
    kernels = [k for k in backends.module(cell.operation, "cuda").KERNELS if is_for(k, cell.dtype)]
    assert kernels, f"{cell.operation} has no CUDA kernel for {cell.dtype}"
    others = other_operations(pytestconfig, cell)
    kernels = [kernel for kernel in kernels if kernel.source.parent.name not in others]
    if not kernels:
        pytest.skip("its kernels are those of other operations, and compiled there")
    for capability in architectures(cell):
        for source in dict.fromkeys(kernel.source for kernel in kernels):
            names = [kernel.name for kernel in kernels if kernel.source == source]
            for name in names:  # without the disassembly, which takes as long as compiling
                compiled = compile_kernels(source, name, names, CUDA_ARCHITECTURES[capability])
                assert static_shared_bytes(kernel_log(compiled, name)) <= MOST_SHARED_BYTES[capability]
