"""Static metrics: the resources that compiled kernels need. They need no GPU and are the same every time."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.backends.cuda.compile import CudaError
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


def kernels_of(cell: Cell, major: int, minor: int, folder: Path | None = None) -> list[dict[str, Any]]:
    """Return the registers, spills, shared memory and instructions of each of a cell's kernels.

    Args:
        cell: an operation's Triton or CUDA C++ kernels for a dtype; of other backends there are none.
        major, minor: the compute capability.
        folder: where to take `impls` from; None for the library's own.

    Raises:
        StaticError: a kernel does not compile. The message names the cell.
    """
    if cell.backend not in ("triton", "cuda"):
        return []
    if cell.backend == "cuda" and folder is None:
        try:
            return cuda_kernels(cell.operation, cell.dtype, 10 * major + minor)
        except CudaError as error:
            raise StaticError(f"{cell}: {error}") from error
    command = [*COMMAND, cell.operation, cell.dtype, f"{major}{minor}", *([CUDA] if cell.backend == "cuda" else [])]
    command += [KERNELS, str(folder)] if folder is not None else []
    process = subprocess.run(command, capture_output=True, text=True, env=environment())
    if process.returncode:
        raise StaticError(f"{cell}: {process.stderr.strip().splitlines()[-1:]}")
    return json.loads(process.stdout)


def metrics(cells: Iterable[Cell]) -> dict[str, list[dict[str, Any]]]:
    """Return `kernels_of` each cell that has kernels, for Hopper, by the cell's name."""
    by_cell = {str(cell): kernels_of(cell, 9, 0) for cell in cells if cell.backend in ("cuda", "triton")}
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
    new: Kernel | None
    old: Kernel | None

    @property
    def same(self) -> bool:
        """Whether both have the same machine code."""
        return self.new is not None and self.old is not None and self.new["code_sha256"] == self.old["code_sha256"]

    @property
    def worse(self) -> list[str]:
        """The resources that are worse now."""
        return [] if self.new is None or self.old is None else list(_worse(self.new, self.old))

    def __str__(self) -> str:
        if self.new is None:
            return f"{self.name} is no more"
        if self.old is None:
            return f"{self.name} is new"
        if self.same:
            return f"{self.name}: the same code"
        return f"{self.name}: {_describe_changes(self.new, self.old)}"


def pair_kernels(new: Sequence[Kernel], old: Sequence[Kernel]) -> list[Pair]:
    """Match the kernels of a cell with those of another compilation of it.

    Triton compiles one function several times, for different arguments, and all variants share a name. Those with the
    same code belong together; the others are matched in the order in which calls have compiled them.
    """
    pairs: list[Pair] = []
    for key in dict.fromkeys((kernel["name"], kernel["arch"]) for kernel in (*new, *old)):
        new_variants, old_variants = ([k for k in side if (k["name"], k["arch"]) == key] for side in (new, old))
        partners = _partners(new_variants, old_variants)
        unmatched = [kernel for place, kernel in enumerate(old_variants) if place not in partners.values()]
        sides = [(k, None if (p := partners.get(i)) is None else old_variants[p]) for i, k in enumerate(new_variants)]
        for number, (newer, older) in enumerate([*sides, *((None, kernel) for kernel in unmatched)]):
            variant = f", variant {number + 1}" if number else ""
            pairs.append(Pair(f"{key[0]} for {key[1]}{variant}", newer, older))
    return pairs


def _partners(new: Sequence[Kernel], old: Sequence[Kernel]) -> dict[int, int]:
    """Map the variants of one kernel in `new` to those in `old`: first by the same code, then in order."""
    partners: dict[int, int] = {}
    free = list(range(len(old)))
    for by_code in (True, False):
        for place, kernel in enumerate(new):
            if place in partners:
                continue
            fits = (index for index in free if not by_code or old[index]["code_sha256"] == kernel["code_sha256"])
            partner = next(fits, None)
            if partner is not None:
                partners[place] = partner
                free.remove(partner)
    return partners


def regressions(new: Kernels, old: Kernels) -> Iterator[str]:
    """Describe what became worse in the cells that both sets have, and the kernels that only one set has."""
    for cell in (name for name in new if name in old):
        for pair in pair_kernels(new[cell], old[cell]):
            if pair.new is None or pair.old is None:
                yield f"{cell}: {pair}"
            yield from (f"{cell}: {pair.name}: {worse}" for worse in pair.worse)


KINDS_SHOWN = 12
MEASURES = {
    "registers": "registers",
    "spill_store_bytes": "bytes of spilled stores",
    "spill_load_bytes": "bytes of spilled loads",
    "shared_bytes": "bytes of shared memory",
}


def _describe_changes(new: Kernel, old: Kernel) -> str:
    """Describe the differences of two codes, and the numbers of added and removed instructions of each kind."""
    parts = [f"{new[key]} {name}, was {old[key]}" for key, name in MEASURES.items() if new[key] != old[key]]
    new_counts: Counter[str] = Counter(new["instruction_counts"])
    old_counts: Counter[str] = Counter(old["instruction_counts"])
    kinds = {
        kind: new_counts[kind] - old_counts[kind]
        for kind in new_counts | old_counts
        if new_counts[kind] != old_counts[kind]
    }
    if not kinds:
        return "; ".join([*parts, "the same instructions in another order or on other operands"])
    count = f"{new_counts.total()} instructions, was {old_counts.total()}"
    by_difference = sorted(kinds, key=lambda kind: (-abs(kinds[kind]), kind))
    differences = [f"{kinds[kind]:+} {kind}" for kind in by_difference[:KINDS_SHOWN]]
    differences += [f"and {len(by_difference) - KINDS_SHOWN} kinds more"] if len(by_difference) > KINDS_SHOWN else []
    return "; ".join([*parts, f"{count}: {', '.join(differences)}"])


def _worse(new: Kernel, old: Kernel) -> Iterator[str]:
    spills, old_spills = (kernel["spill_store_bytes"] + kernel["spill_load_bytes"] for kernel in (new, old))
    if spills > old_spills:
        yield f"{spills} bytes of spills, after {old_spills}"
    warps, old_warps = warps_by_registers(new["registers"]), warps_by_registers(old["registers"])
    if warps < old_warps:
        yield (
            f"{new['registers']} registers, after {old['registers']}: {warps} warps a multiprocessor at the most,"
            f" after {old_warps}"
        )
    if new["shared_bytes"] > old["shared_bytes"]:
        yield f"{new['shared_bytes']} bytes of shared memory, after {old['shared_bytes']}"
    count, old_count = (sum(kernel["instruction_counts"].values()) for kernel in (new, old))
    if count > old_count:
        kinds = {
            kind: number - old["instruction_counts"].get(kind, 0) for kind, number in new["instruction_counts"].items()
        }
        worst = sorted((k for k in kinds if kinds[k] > 0), key=lambda k: -kinds[k])[:3]
        yield f"{count} instructions, after {old_count}: {', '.join(f'{kinds[kind]:+} {kind}' for kind in worst)}"
