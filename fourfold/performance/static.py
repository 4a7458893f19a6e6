"""Static metrics: the resources that compiled kernels need. They need no GPU and are the same every time."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fourfold.checks.ahead_of_time import COMMAND, CUDA, KERNELS, cuda_kernels, environment
from fourfold.engine.cells import Cell

# A compiled kernel's resources, as `fourfold.backends.cuda.compile.KernelResources` has them; those of each cell.
Kernel = Mapping[str, Any]
Kernels = Mapping[str, Sequence[Kernel]]

WARP = 32
REGISTERS_OF_A_MULTIPROCESSOR = 65536
REGISTER_UNIT = 256  # a warp's registers are allocated in multiples of this
MOST_WARPS = 64


class StaticError(Exception):
    """A kernel could not be compiled for a GPU."""


def capability(device: str) -> tuple[int, int]:
    """Return the compute capability of torch's current GPU; on the CPU that of Hopper, (9, 0)."""
    return torch.cuda.get_device_capability() if device == "cuda" else (9, 0)


def kernels_of(cell: Cell, major: int, minor: int, folder: Path | None = None) -> list[dict[str, Any]]:
    """Return the registers, spills, shared memory and instructions of each of a cell's kernels.

    Args:
        cell: an operation's Triton or CUDA C++ kernels for a dtype; of other backends there are none.
        major, minor: the compute capability.
        folder: where to take `impls` from; None for the library's own.

    Raises:
        StaticError: a Triton kernel does not compile, or one of `folder`.
        CudaError: a CUDA C++ kernel does not compile.
    """
    if cell.backend not in ("triton", "cuda"):
        return []
    if cell.backend == "cuda" and folder is None:
        return cuda_kernels(cell.operation, cell.dtype, 10 * major + minor)
    command = [*COMMAND, cell.operation, cell.dtype, f"{major}{minor}", *([CUDA] if cell.backend == "cuda" else [])]
    command += [KERNELS, str(folder)] if folder is not None else []
    process = subprocess.run(command, capture_output=True, text=True, env=environment())
    if process.returncode:
        raise StaticError(f"{cell}: {process.stderr.strip().splitlines()[-1:]}")
    return json.loads(process.stdout)


def metrics(cells: Iterable[Cell], device: str) -> dict[str, list[dict[str, Any]]]:
    """Return `kernels_of` each cell that has kernels, by the cell's name."""
    major, minor = capability(device)
    by_cell = {str(cell): kernels_of(cell, major, minor) for cell in cells if cell.backend in ("cuda", "triton")}
    return {name: kernels for name, kernels in by_cell.items() if kernels}


def warps_by_registers(registers: int) -> int:
    """Return how many warps fit on a multiprocessor if only the registers per thread limit them."""
    units = -(-registers * WARP // REGISTER_UNIT)
    return min(MOST_WARPS, REGISTERS_OF_A_MULTIPROCESSOR // (units * REGISTER_UNIT)) if units else MOST_WARPS


@dataclass(frozen=True)
class Pair:
    """A kernel of two compilations of one cell; None stands for the side that does not have it.

    Attributes:
        name: with its architecture and, of several variants, its number.
    """

    name: str
    now: Kernel | None
    then: Kernel | None

    @property
    def same(self) -> bool:
        """Whether both have the same machine code."""
        return self.now is not None and self.then is not None and self.now["code_sha256"] == self.then["code_sha256"]

    @property
    def worse(self) -> list[str]:
        """The resources that are worse now."""
        return [] if self.now is None or self.then is None else list(_worse(self.now, self.then))

    def __str__(self) -> str:
        if self.now is None:
            return f"{self.name} is no more"
        if self.then is None:
            return f"{self.name} is new"
        if self.same:
            return f"{self.name}: the same code"
        return f"{self.name}: {_describe_changes(self.now, self.then)}"


def pair_kernels(now: Sequence[Kernel], then: Sequence[Kernel]) -> list[Pair]:
    """Match the kernels of a cell with those of another compilation of it.

    Triton compiles one function several times, for different arguments, and all variants share a name. Those with the
    same code belong together; the others are matched in the order in which calls have compiled them.
    """
    pairs: list[Pair] = []
    for key in dict.fromkeys((kernel["name"], kernel["arch"]) for kernel in (*now, *then)):
        today, before = ([kernel for kernel in side if (kernel["name"], kernel["arch"]) == key] for side in (now, then))
        partners = _partners(today, before)
        unmatched = [kernel for place, kernel in enumerate(before) if place not in partners.values()]
        sides = [(kernel, None if (p := partners.get(i)) is None else before[p]) for i, kernel in enumerate(today)]
        for number, (one, other) in enumerate([*sides, *((None, kernel) for kernel in unmatched)]):
            variant = f", variant {number + 1}" if number else ""
            pairs.append(Pair(f"{key[0]} for {key[1]}{variant}", one, other))
    return pairs


def _partners(now: Sequence[Kernel], then: Sequence[Kernel]) -> dict[int, int]:
    """Map the variants of one kernel in `now` to those in `then`: first by the same code, then in order."""
    partners: dict[int, int] = {}
    free = list(range(len(then)))
    for same in (True, False):
        for place, kernel in enumerate(now):
            if place in partners:
                continue
            fits = (other for other in free if not same or then[other]["code_sha256"] == kernel["code_sha256"])
            partner = next(fits, None)
            if partner is not None:
                partners[place] = partner
                free.remove(partner)
    return partners


def regressions(now: Kernels, then: Kernels) -> Iterator[str]:
    """Describe what became worse in the cells that both sets have, and the kernels that only one set has."""
    for cell in (name for name in now if name in then):
        for pair in pair_kernels(now[cell], then[cell]):
            if pair.now is None or pair.then is None:
                yield f"{cell}: {pair}"
            yield from (f"{cell}: {pair.name}: {worse}" for worse in pair.worse)


KINDS_SHOWN = 12
MEASURES = {
    "registers": "registers",
    "spill_store_bytes": "bytes of spilled stores",
    "spill_load_bytes": "bytes of spilled loads",
    "shared_bytes": "bytes of shared memory",
}


def _describe_changes(now: Kernel, then: Kernel) -> str:
    """Describe the differences of two codes, and the numbers of added and removed instructions of each kind."""
    parts = [f"{now[key]} {what}, was {then[key]}" for key, what in MEASURES.items() if now[key] != then[key]]
    one: Counter[str] = Counter(now["instruction_counts"])
    other: Counter[str] = Counter(then["instruction_counts"])
    kinds = {kind: one[kind] - other[kind] for kind in one | other if one[kind] != other[kind]}
    if not kinds:
        return "; ".join([*parts, "the same instructions in another order or on other operands"])
    count = f"{one.total()} instructions, was {other.total()}"
    most = sorted(kinds, key=lambda kind: (-abs(kinds[kind]), kind))
    listed = [f"{kinds[kind]:+} {kind}" for kind in most[:KINDS_SHOWN]]
    listed += [f"and {len(most) - KINDS_SHOWN} kinds more"] if len(most) > KINDS_SHOWN else []
    return "; ".join([*parts, f"{count}: {', '.join(listed)}"])


def _worse(now: Kernel, then: Kernel) -> Iterator[str]:
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
