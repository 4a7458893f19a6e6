"""matmul in CUDA C++: a portable kernel, and one for Hopper with wgmma and the copy engine (TMA).

The copy engine takes rows that begin at multiples of 16 bytes. A large matrix whose rows do not is copied first: a copy
takes a small part of the time of a product. Where the result has too few tiles for all multiprocessors, several blocks
share a tile, each with a part of the terms.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.cuda.tensor_map import swizzled_map
from fourfold.backends.launch import cdiv, is_hopper, is_hopper_or_emulated, multiprocessors
from fourfold.backends.tuning import Configuration, Tuner

from .operators import (
    ACTIVATION_NUMBERS,
    LITTLE_WORK,
    MANY_TERMS,
    MOST_COPIES,
    MOST_SHARED,
    dense_rows,
    one_axis_dense,
    padded_row,
    register_matmul,
    run_fastest,
)

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
HOPPER_SOURCE = SOURCE.with_name("cuda_kernel_hopper.cu")
BLOCK = 256
# Of the kernel that copies rows: vectors of a thread, and words of 16 bytes that a warp exchanges.
COPIED, EXCHANGED = 4, 33
# For the Hopper kernel: rows of a warpgroup, terms per step, and elements of a 128-byte line, the unit of its copies.
HOPPER_ROWS, HOPPER_TERMS, HOPPER_LINE = 64, 64, 64
HALF_TYPES = (torch.float16, torch.bfloat16)


Tile = tuple[int, ...]


def _portable(name: str, tiles: dict[torch.dtype, Tile], parts: int = 1) -> Configuration:
    kernels = {
        dtype: CudaKernel(
            SOURCE, f"matmul_kernel<{CPP_TYPES[dtype]}, {', '.join(map(str, tile))}, {str(parts > 1).lower()}>"
        )
        for dtype, tile in tiles.items()
    }
    name += f"_in_{parts}_parts" if parts > 1 else ""
    return Configuration(name, {"kernels": kernels, "tiles": tiles, "parts": parts}, frozenset(tiles))


# Rows and columns of a tile, terms of a step, rows and columns of warps, blocks of a multiprocessor, and stages.
SMALL = _portable(
    "small_tiles",
    {
        **dict.fromkeys(HALF_TYPES, (32, 32, 32, 2, 1, 8, 2)),
        torch.float32: (32, 32, 32, 2, 1, 6, 3),
        torch.float64: (32, 32, 16, 2, 1, 8, 3),
    },
)
LARGE = _portable(
    "large_tiles",
    {
        **dict.fromkeys(HALF_TYPES, (128, 128, 32, 4, 2, 2, 2)),
        torch.float32: (128, 256, 16, 2, 4, 1, 3),
        torch.float64: (64, 64, 16, 4, 2, 2, 3),
    },
)
SMALL_IN_PARTS = _portable("small_tiles", {torch.float32: SMALL.options["tiles"][torch.float32]}, 4)
MEDIUM, WIDE, SQUARE = (64, 64, 16, 2, 2, 6, 3), (64, 128, 16, 2, 2, 3, 3), (128, 128, 16, 2, 4, 2, 3)
PORTABLE = (
    LARGE,
    _portable("square_tiles", {torch.float32: SQUARE}),
    _portable("square_tiles", {torch.float32: SQUARE}, 2),
    _portable("wide_tiles", {torch.float32: WIDE}),
    _portable("wide_tiles", {torch.float32: WIDE}, 3),
    _portable("medium_tiles", {torch.float32: MEDIUM, torch.float64: (64, 64, 16, 2, 2, 4, 3)}),
    _portable("medium_tiles", {torch.float32: MEDIUM}, 4),
    _portable("flat_tiles", {torch.float32: (16, 128, 32, 1, 4, 5, 2)}, 8),
    SMALL,
    SMALL_IN_PARTS,
)


def _hopper(
    rows: int, columns: int, stages: int, staged: int, group: int, parts: int = 1, on_cpu: bool = False
) -> Configuration:
    # By dtype, and whether the adjacent elements are those of a column of a, and those of a row of b.
    kernels = {
        (dtype, *along): CudaKernel(
            HOPPER_SOURCE,
            f"matmul_hopper_kernel<{CPP_TYPES[dtype]}, {rows}, {columns}, {stages}, {staged}, "
            f"{', '.join(str(flag).lower() for flag in (*along, parts > 1))}>",
        )
        for dtype in HALF_TYPES
        for along in itertools.product((False, True), repeat=2)
    }
    tiles = stages * (rows + columns) * HOPPER_TERMS * 2
    shared_bytes = tiles + rows * staged * 2 + 2 * stages * 8 + 1024
    shared = f"_in_{parts}_parts" if parts > 1 else ""
    return Configuration(
        f"hopper_{rows}x{columns}x{HOPPER_TERMS}_{stages}_stages_{group}_grouped{shared}",
        {
            "kernels": kernels,
            "rows": rows,
            "columns": columns,
            "shared_bytes": shared_bytes,
            "group": group,
            "parts": parts,
        },
        frozenset(HALF_TYPES),
        is_hopper_or_emulated if on_cpu else is_hopper,
        "compute capability 9.0: wgmma and TMA; the CPU's emulation, which takes seconds, runs others like it",
    )


# More stages hide more latency. More staged columns let the result be written while the next tile is multiplied. Narrow
# tiles, and tiles in parts, keep all multiprocessors busy where the result is small.
HOPPER = (
    _hopper(128, 256, 4, 128, 16, on_cpu=True),
    _hopper(128, 256, 3, 256, 16),
    _hopper(128, 256, 4, 128, 8),
    _hopper(128, 128, 6, 128, 8),
    _hopper(128, 64, 8, 64, 8),
    _hopper(128, 192, 4, 192, 8),
    _hopper(64, 128, 8, 128, 8),
    _hopper(64, 64, 8, 64, 8),
    _hopper(64, 128, 8, 64, 8, parts=2, on_cpu=True),
    _hopper(64, 128, 8, 64, 8, parts=4),
    _hopper(128, 128, 6, 64, 8, parts=8),
)
NARROW = HOPPER[7]
# What copies a matrix, or the gradient of a product, to aligned rows, and what adds the parts of tiles.
COPY_ROWS, SUM_OF_PARTS = (
    {dtype: CudaKernel(SOURCE, f"{name}<{CPP_TYPES[dtype]}>") for dtype in CPP_TYPES}
    for name in ("copy_rows_kernel", "sum_of_parts_kernel")
)
KERNELS = (
    *(kernel for configuration in PORTABLE for kernel in configuration.options["kernels"].values()),
    *COPY_ROWS.values(),
    *SUM_OF_PARTS.values(),
)
# These compile for sm_90a only.
HOPPER_KERNELS = tuple({kernel.name: kernel for c in HOPPER for kernel in c.options["kernels"].values()}.values())
TUNER = Tuner("matmul_cuda", (*HOPPER, *PORTABLE), Path(__file__))


def _vectors(matrix: torch.Tensor) -> bool:
    """Return whether the elements that the portable kernel reads together make whole vectors, aligned to 16 bytes."""
    dense = one_axis_dense(matrix)
    return dense is not None and matrix.shape[dense] * matrix.element_size() % 16 == 0


def _padded(
    *matrices: torch.Tensor, output: torch.Tensor | None = None, activation: int = 0, negative_slope: float = 0.0
) -> list[torch.Tensor]:
    """Return copies of up to three matrices whose rows begin at multiples of 16 bytes, as a tensor map needs.

    With the output of an activation, the first is the gradient of its input; the first matrix is then the cotangent.
    """
    copies, arguments, warps = [], [], 0
    for matrix in matrices:
        (rows, columns), pitch = matrix.shape, padded_row(matrix)
        copy = torch.empty((rows, pitch), dtype=matrix.dtype, device=matrix.device)
        copies.append(copy[:, :columns])
        if matrix.is_contiguous() and pitch == columns:
            rows, columns, pitch = 1, matrix.numel(), matrix.numel()
        arguments += [matrix, copy, rows, columns, *matrix.stride(), pitch]
        warps = max(warps, rows * cdiv(pitch * copy.element_size(), 16 * 32 * COPIED))
    if copies:
        COPY_ROWS[matrices[0].dtype].launch(
            (cdiv(warps, BLOCK // 32), len(copies)),
            (32, BLOCK // 32),
            output,
            activation,
            negative_slope,
            *arguments,
            *(None, None, 0, 0, 0, 0, 0) * (MOST_COPIES - len(copies)),
            shared_bytes=BLOCK // 32 * EXCHANGED * 16,
        )
    return copies


def _product(a: torch.Tensor, b: torch.Tensor, activation: str, negative_slope: float) -> torch.Tensor:
    (m, k), n, dtype = a.shape, b.shape[1], a.dtype
    c = torch.empty((m, n), dtype=dtype, device=a.device)
    if m == 0 or n == 0:
        return c
    number = ACTIVATION_NUMBERS[activation]
    vectors = _vectors(a), _vectors(b)
    dense_a, dense_b = one_axis_dense(a), one_axis_dense(b)
    # Rows that no tensor map can describe are copied first, where the product takes long beside that.
    mapped = (dense_a is not None and dense_b is not None) or m * n * k >= LITTLE_WORK

    def run_hopper(options: Mapping[str, Any], to: torch.Tensor) -> None:
        rows, columns, parts = options["rows"], options["columns"], options["parts"]
        (rows_of_a, a_along_m), (rows_of_b, b_along_k) = dense_rows(((a, dense_a), (b, dense_b)), _padded)
        across = HOPPER_TERMS, HOPPER_LINE
        a_map = swizzled_map(rows_of_a, across if a_along_m else (rows, HOPPER_TERMS))
        b_map = swizzled_map(rows_of_b, (columns, HOPPER_TERMS) if b_along_k else across)
        by_map = parts == 1 and one_axis_dense(c) == 1
        # Without a map for c, the kernel ignores this argument, so any map will do.
        c_map = swizzled_map(c, (HOPPER_ROWS, HOPPER_LINE)) if by_map else a_map
        options["kernels"][dtype, a_along_m, not b_along_k].launch(
            min(cdiv(m, rows) * cdiv(n, columns) * parts, multiprocessors(a.device)),
            128 * (1 + rows // HOPPER_ROWS),
            a_map,
            b_map,
            c_map,
            to,
            m,
            n,
            k,
            by_map,
            options["group"],
            parts,
            number,
            negative_slope,
            shared_bytes=options["shared_bytes"],
        )

    def run_portable(options: Mapping[str, Any], to: torch.Tensor) -> None:
        tile_m, tile_n, terms, warps_m, warps_n, _, stages = options["tiles"][dtype]
        options["kernels"][dtype].launch(
            cdiv(m, tile_m) * cdiv(n, tile_n) * options["parts"],
            warps_m * warps_n * 32,
            a,
            b,
            to,
            m,
            n,
            k,
            *a.stride(),
            *b.stride(),
            *vectors,
            options["parts"],
            number,
            negative_slope,
            shared_bytes=stages * terms * (tile_m + tile_n + 32 // dtype.itemsize) * dtype.itemsize,
        )

    def run(configuration: Configuration) -> None:
        options = configuration.options
        parts, compute = options["parts"], torch.float64 if dtype == torch.float64 else torch.float32
        to = c if parts == 1 else torch.empty((parts, m, n), dtype=compute, device=c.device)
        (run_hopper if configuration in HOPPER else run_portable)(options, to)
        if parts > 1:
            SUM_OF_PARTS[dtype].launch(cdiv(c.numel(), BLOCK), BLOCK, to, c, c.numel(), parts, number, negative_slope)

    def fits(configuration: Configuration) -> bool:
        options = configuration.options
        hopper, parts = configuration in HOPPER, options["parts"]
        rows, columns = (options["rows"], options["columns"]) if hopper else options["tiles"].get(dtype, (1, 1))[:2]
        # Of many tiles in parts, the sums would take much memory, and no multiprocessor lacks work.
        few = parts == 1 or cdiv(m, rows) * cdiv(n, columns) <= MOST_SHARED
        return configuration.serves(dtype, a.device) and few and parts - (not hopper) <= cdiv(k, HOPPER_TERMS)

    def default() -> Configuration:
        small = m * n <= 512 * 512
        hopper = NARROW if small else HOPPER[0]
        if a.is_cuda and mapped and k > HOPPER_TERMS and fits(hopper):
            return hopper
        if a.is_cuda and small and k >= MANY_TERMS and fits(SMALL_IN_PARTS):
            return SMALL_IN_PARTS
        return SMALL if small else LARGE

    kind = (str(dtype), a.stride(1) == 1, b.stride(1) == 1, vectors, dense_a, dense_b)
    run_fastest(TUNER, a.device, (m, n, k), kind, fits, default, run)
    return c


def depends_on_batch(dtype: str, device: str) -> str | None:
    """Return why a sample depends on its batch: on a GPU all extents, also the number of rows, choose the tiles."""
    return None if device == "cpu" else "the depth of the tiles, which orders the sums, is chosen by all extents"


matmul = register_matmul("cuda", _product, _padded, is_hopper_or_emulated)
