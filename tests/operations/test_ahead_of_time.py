"""Kernels compile for every architecture that is supported, on a machine that has none of them."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from impls.cuda_compile import compile_ahead_of_time
from properties.ahead_of_time import is_for
from properties.cells import Cell
from properties.checks import Subject

# Compute capability, and the most shared memory that a block may have there, in bytes.
TRITON_ARCHITECTURES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
CUDA_ARCHITECTURES = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100a": 227 * 1024}


def record(request: pytest.FixtureRequest, kernels: Iterable[Mapping[str, Any]]) -> None:
    """Keep what the kernels need with the test's report."""
    request.node.user_properties.append(("resources", list(kernels)))


@pytest.mark.only(backends=["triton"])
def test_triton_kernels_compile_for_every_architecture(cell: Cell, request: pytest.FixtureRequest) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "properties.ahead_of_time", cell.operation, cell.dtype]
    # This process may interpret kernels, and then cannot compile them.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, *map(str, TRITON_ARCHITECTURES)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
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
                resources.append({**vars(compiled), "instruction_counts": dict(compiled.instruction_counts)})
    record(request, resources)
