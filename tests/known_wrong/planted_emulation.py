"""Planted faults in the launch: a grid, a block or shared memory that no GPU takes. The results are right."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from fourfold.impls.softmax.torch_eager import softmax as softmax_in_torch

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.launch import ImpossibleLaunch
from fourfold.backends.signature import signature_of
from fourfold.numerics.dtypes import DType
from fourfold.operations.blame import ImpossibleGrid
from fourfold.operations.case import Case

from .planted import Fault, Implementation

Tensor = torch.Tensor
SOURCE = Path(__file__).parent / "planted_emulation.cu"
EXPONENTIALS = CudaKernel(SOURCE, "exponentials")


@triton.jit
def exponentials_kernel(x_ptr, y_ptr, cols, AXIS: tl.constexpr, BLOCK: tl.constexpr):
    # One program owns one row.
    at = tl.arange(0, BLOCK)
    offsets = tl.program_id(AXIS).to(tl.int64) * cols + at
    x = tl.load(x_ptr + offsets, mask=at < cols, other=-float("inf"))
    powers = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + offsets, powers / tl.sum(powers, 0), mask=at < cols)


def softmax(language: str, wrong: str) -> Implementation:
    """Compute softmax of contiguous rows by a launch that is impossible for many rows, or for long ones."""

    def implementation(x: Tensor) -> Tensor:
        signature_of(softmax_in_torch).check(x)
        given, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows, cols = (x.numel() // x.shape[-1], x.shape[-1]) if x.numel() else (0, 0)
        grid = (1, 1, rows) if wrong == "rows_along_z" else (1, rows) if wrong == "rows_along_y" else (rows,)
        if rows and language == "triton":
            block = triton.next_power_of_2(cols)
            exponentials_kernel[grid](given, y, cols, AXIS=len(grid) - 1, BLOCK=block)
        elif rows:
            block = (1, 1, min(cols, 256)) if wrong == "threads_along_z" else 32
            shared_bytes = cols * (16 if wrong == "shared_bytes_of_long_rows" else 4)
            EXPONENTIALS.launch(grid, block, given, y, rows, cols, shared_bytes=shared_bytes)
        return y

    return implementation


def of_shape(rows: int, cols: int, dtype: DType) -> Case:
    """Return a case of softmax."""
    x = np.cos(np.arange(rows * cols, dtype=np.float64)).reshape(rows, cols).astype(dtype.numpy)
    return Case({"x": x}, x)


def _launch(language: str, wrong: str, rows: int, cols: int, says: str) -> Fault:
    return Fault(
        wrong,
        "softmax",
        lambda: softmax(language, wrong),
        says=says,
        right_on=functools.partial(of_shape, 3, 5),
        language=language,
        raises=ImpossibleGrid if "rows_along" in wrong else ImpossibleLaunch,
        # On a GPU, Triton itself reports that it cannot launch this, and the driver reports a lack of memory.
        only_on="cpu" if language == "triton" or wrong == "shared_bytes_of_long_rows" else "",
        examples={"impossible": functools.partial(of_shape, rows, cols)},
    )


LAUNCHES: tuple[tuple[Any, ...], ...] = (
    ("cuda", "rows_along_y", 65_536, 1, r"^exponentials: a grid .* has 65,536 blocks along y; .* at most 65,535"),
    ("cuda", "rows_along_z", 65_536, 1, r"^exponentials: a grid .* has 65,536 blocks along z; .* at most 65,535"),
    ("triton", "rows_along_y", 65_536, 1, r"^exponentials_kernel: a grid .* has 65,536 blocks along y"),
    ("triton", "rows_along_z", 65_536, 1, r"^exponentials_kernel: a grid .* has 65,536 blocks along z"),
    ("cuda", "threads_along_z", 1, 65, r"^exponentials: a block .* has 65 threads along z; a GPU takes at most 64"),
    ("cuda", "shared_bytes_of_long_rows", 1, 15_000, r"240,000 bytes of dynamic shared memory; a block has at most"),
)
FAULTS = tuple(_launch(*launch) for launch in LAUNCHES)
