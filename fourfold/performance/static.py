"""Static metrics: the resources that compiled kernels need. They need no GPU and are the same every time."""

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fourfold import backends
from fourfold.backends.cuda.compile import compile_ahead_of_time
from fourfold.backends.cuda.launch import architecture
from fourfold.checks.ahead_of_time import COMMAND, environment, is_for, needs
from fourfold.running.cells import Cell

Kernels = Mapping[str, Sequence[Mapping[str, Any]]]

WARP = 32
REGISTERS_OF_A_MULTIPROCESSOR = 65536
REGISTER_UNIT = 256  # a warp's registers are allocated in multiples of this
MOST_WARPS = 64


class StaticError(Exception):
    """A kernel could not be compiled for a GPU."""


def capability(device: str) -> tuple[int, int]:
    """Return the compute capability of torch's current GPU; on the CPU that of Hopper, (9, 0)."""
    return torch.cuda.get_device_capability() if device == "cuda" else (9, 0)


def kernels_of(cell: Cell, major: int, minor: int) -> list[dict[str, Any]]:
    """Return the registers, spills, shared memory and instructions of each of a cell's kernels.

    Raises:
        StaticError: a Triton kernel does not compile.
        CudaError: a CUDA C++ kernel does not compile.
    """
    if cell.backend == "cuda":
        kernels = [k for k in backends.module(cell.operation, "cuda").KERNELS if is_for(k, cell.dtype)]
        found: list[dict[str, Any]] = []
        for source in dict.fromkeys(kernel.source for kernel in kernels):
            names = [kernel.name for kernel in kernels if kernel.source == source]
            compiled = compile_ahead_of_time(source, names, architecture(major, minor))
            found += map(needs, compiled.values())
        return found
    if cell.backend == "triton":
        command = [*COMMAND, cell.operation, cell.dtype, f"{major}{minor}"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment())
        if done.returncode:
            raise StaticError(f"{cell}: {done.stderr.strip().splitlines()[-1:]}")
        return json.loads(done.stdout)
    return []


def metrics(cells: Iterable[Cell], device: str) -> dict[str, list[dict[str, Any]]]:
    """Return `kernels_of` each cell that has kernels, by the cell's name."""
    major, minor = capability(device)
    found = {str(cell): kernels_of(cell, major, minor) for cell in cells if cell.backend in ("cuda", "triton")}
    return {name: kernels for name, kernels in found.items() if kernels}


def warps_by_registers(registers: int) -> int:
    """Return how many warps fit on a multiprocessor if only the registers per thread limit them."""
    units = -(-registers * WARP // REGISTER_UNIT)
    return min(MOST_WARPS, REGISTERS_OF_A_MULTIPROCESSOR // (units * REGISTER_UNIT)) if units else MOST_WARPS


def regressions(now: Kernels, then: Kernels) -> Iterator[str]:
    """Describe what became worse in the cells that both sets have, and the kernels that only one set has."""
    for cell in (name for name in now if name in then):
        today, before = _by_name(now[cell]), _by_name(then[cell])
        for gone in before.keys() - today.keys():
            yield f"{cell}: {_show(gone)} is no more"
        for new in today.keys() - before.keys():
            yield f"{cell}: {_show(new)} is new"
        for key in today:
            if key in before:
                yield from (f"{cell}: {_show(key)}: {worse}" for worse in _worse(today[key], before[key]))


def _by_name(kernels: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, int], Mapping[str, Any]]:
    # Triton compiles one function several times for different arguments. The variants share a name; calls order them.
    found: dict[tuple[str, str, int], Mapping[str, Any]] = {}
    for kernel in kernels:
        count = sum(key[:2] == (kernel["name"], kernel["arch"]) for key in found)
        found[kernel["name"], kernel["arch"], count] = kernel
    return found


def _show(key: tuple[str, str, int]) -> str:
    name, arch, count = key
    return f"{name} for {arch}" + (f", variant {count + 1}" if count else "")


def _worse(now: Mapping[str, Any], then: Mapping[str, Any]) -> Iterator[str]:
    spills, former = (kernel["spill_store_bytes"] + kernel["spill_load_bytes"] for kernel in (now, then))
    if spills > former:
        yield f"{spills} bytes of spills, after {former}"
    warps, more = warps_by_registers(now["registers"]), warps_by_registers(then["registers"])
    if warps < more:
        yield (
            f"{now['registers']} registers, after {then['registers']}: {warps} warps a multiprocessor at the most,"
            f" after {more}"
        )
    if now["shared_bytes"] > then["shared_bytes"]:
        yield f"{now['shared_bytes']} bytes of shared memory, after {then['shared_bytes']}"
    count, fewer = (sum(kernel["instruction_counts"].values()) for kernel in (now, then))
    if count > fewer:
        kinds = {
            kind: number - then["instruction_counts"].get(kind, 0) for kind, number in now["instruction_counts"].items()
        }
        most = sorted((k for k in kinds if kinds[k] > 0), key=lambda k: -kinds[k])[:3]
        yield f"{count} instructions, after {fewer}: {', '.join(f'{kinds[kind]:+} {kind}' for kind in most)}"
