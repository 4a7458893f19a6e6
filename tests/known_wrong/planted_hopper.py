"""Planted faults in a matmul by wgmma and the copy engine (TMA), which the emulation on the CPU runs.

All of them are about what runs beside the threads: waits for a phase of an mbarrier, fences, groups, swizzles.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fourfold.impls.matmul.operators import ACTIVATION_NUMBERS
from fourfold.impls.matmul.torch_eager import matmul as right

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.cuda.tensor_map import swizzled_map
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .generic import with_torchs_gradient
from .planted import OUTPUT, CaseOf, Fault, Implementation

Tensor = torch.Tensor
SOURCE = Path(__file__).parent / "planted_hopper.cu"
TILE, THREADS = 64, 128
# Two stages of two tiles, a tile of the result, two mbarriers, and room to align all of it.
SHARED_BYTES = 5 * TILE * TILE * 2 + 16 + 1024
BLOCKS = 3
RACE, DEADLOCK, MISALIGNED = cuda_on_cpu.Race, cuda_on_cpu.Deadlock, cuda_on_cpu.Misaligned
UNWRITTEN = cuda_on_cpu.UninitialisedShared
NOT_LANDED = r"wgmma reads shared address \d+ before the copy to it has landed in line \d+: no wait on its mbarrier"
# What is said of each mistake, and by which exception; None for a wrong result.
MISTAKES: dict[str, tuple[type[Exception] | None, str]] = {
    "NO_WAIT": (RACE, NOT_LANDED),
    "ONE_WARP_WAITS": (
        RACE,
        r"wgmma reads shared address \d+, to which a copy was made in line \d+, without a wait on its mbarrier's phase",
    ),
    "WRONG_PARITY": (RACE, NOT_LANDED),
    "PARITY_NEVER_TURNS": (RACE, NOT_LANDED),
    "STAGE_REUSED": (RACE, r"copies to shared address \d+, which wgmma still reads in line \d+: no wait for its group"),
    "NO_BARRIER_BEFORE_REUSE": (RACE, r"copies to shared address \d+, which thread \d+ has read, with no barrier"),
    "NO_WGMMA_FENCE": (RACE, "wgmma takes registers that the threads have used, with no wgmma.fence between"),
    "REGISTERS_READ_EARLY": (None, r"output\[.* is nan, expected"),
    "NO_PROXY_FENCE": (
        RACE,
        r"a bulk copy reads shared address \d+, which thread \d+ wrote in line \d+, with no fence",
    ),
    "NO_MBARRIER_FENCE": (RACE, r"a bulk copy with the mbarrier at .*, with no fence after its initialisation"),
    "NO_BARRIER_AFTER_INIT": (RACE, r"the mbarrier at .* was initialised by thread \d+, with no barrier between"),
    "TOO_FEW_BYTES": (RACE, NOT_LANDED),
    "TOO_MANY_BYTES": (
        DEADLOCK,
        r"waits for ever for the mbarrier at .*, whose phase 0 lacks 0 arrivals and 16384 bytes",
    ),
    "RESULT_OVERWRITTEN": (RACE, r"writes shared address \d+, which a bulk copy still reads in line \d+: no wait for"),
    "LEAVES_EARLY": (RACE, r"leaves the kernel while a bulk copy still reads shared memory"),
    "NOT_SWIZZLED": (None, OUTPUT),
    "WRONG_STRIDE": (None, OUTPUT),
    "NOT_ALIGNED": (MISALIGNED, r"a bulk copy to shared address \d+, which is not a multiple of 128"),
    "NO_SYNC_BEFORE_STORE": (
        UNWRITTEN,
        r"a bulk copy reads shared address \d+, which nothing in this block has wri",
    ),
}
KERNELS = {name: CudaKernel(SOURCE, f"tiles_kernel<{name}>") for name in ("NONE", *MISTAKES)}


def aligned(matrix: Tensor) -> Tensor:
    """The matrix as the copy engine takes it: contiguous, from a multiple of 16 bytes on."""
    return matrix.clone(memory_format=torch.contiguous_format) if matrix.data_ptr() % 16 else matrix.contiguous()


def runs_on(device: torch.device) -> bool:
    """Whether the kernel runs there: on a GPU of compute capability 9.0, or on a CPU, which emulates it."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) == (9, 0)


def matmul(mistake: str = "NONE") -> Implementation:
    """matmul of float16 by the kernel with a mistake; where the copy engine cannot take the terms, torch's."""

    def fused(a: Tensor, b: Tensor, activation: str = "none", negative_slope: float = 0.01) -> Tensor:
        (m, k), n = a.shape, b.shape[1]
        if not m * n * k or k % 8 or a.dtype != torch.float16 or not runs_on(a.device):
            return right(a, b, activation, negative_slope)
        # The copy engine writes rows of a multiple of 16 bytes.
        c = torch.empty((m, -(-n // 8) * 8), dtype=a.dtype, device=a.device)
        matrices = aligned(a), aligned(b.t()), c  # a map does not keep its matrix alive
        maps = [swizzled_map(matrix, (TILE, TILE)) for matrix in matrices]
        blocks = min(-(-m // TILE) * -(-n // TILE), BLOCKS)
        number = ACTIVATION_NUMBERS[activation]
        KERNELS[mistake].launch(blocks, THREADS, *maps, c, m, n, k, number, negative_slope, shared_bytes=SHARED_BYTES)
        return c[:, :n].contiguous()

    return with_torchs_gradient("matmul", fused)


def of_shape(m: int, k: int, n: int, dtype: DType) -> Case:
    """A case."""

    def waves(rows: int, cols: int) -> np.ndarray:
        return np.cos(np.arange(rows * cols, dtype=np.float64) ** 1.1).reshape(rows, cols).astype(dtype.numpy)

    parameters = {"activation": "leaky_relu", "negative_slope": 0.5}
    return Case({"a": waves(m, k), "b": waves(k, n)}, np.ones((m, n), dtype=dtype.numpy), parameters)


# Of three steps, and not whole.
EXAMPLES: dict[str, CaseOf] = {
    "one_tile": functools.partial(of_shape, 60, 136, 56),
    "four_tiles": functools.partial(of_shape, 100, 136, 72),
}


def _fault(name: str, raises: type[Exception] | None, says: str) -> Fault:
    more: dict[str, Any] = {"says": says}
    if raises is not None:
        more = {"raises": raises, "says": rf"\(planted_hopper\.cu:\d+\), block .*: {says}"}
    about: dict[str, Any] = {"language": "cuda", "dtype": "float16", "only_on": "cpu", "examples": EXAMPLES}
    return Fault(name.lower(), "matmul", lambda: matmul(name), **about, **more)


FAULTS = tuple(_fault(name, *expected) for name, expected in MISTAKES.items())
