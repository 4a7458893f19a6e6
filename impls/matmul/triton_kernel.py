"""matmul in Triton: a kernel with pointers for any strides, and a persistent one with tensor descriptors (TMA).

A large matrix that no descriptor can describe is copied first, and programs share the terms of a tile where there are
few tiles, as in CUDA C++.
"""

import functools
import struct
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fourfold.backends.launch import cdiv
from fourfold.backends.triton import launch as triton_launch
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

BLOCK_ELEMENTS = 1024
COPIED_ROWS, COPIED_COLUMNS = 32, 64
# Of a product for which it pays to copy a matrix that is loaded slowly.
MANY_ROWS, MANY_COLUMNS = 256, 2048


@triton.jit
def slope_of(slope_bits):
    """Return leaky_relu's slope in float64. It is passed as bits: a kernel's parameters cannot be float64."""
    return tl.cast(slope_bits, tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def activate(product, slope_bits, ACTIVATION: tl.constexpr):
    """Apply no activation, relu or leaky_relu. NaN stays NaN."""
    if ACTIVATION == 1:
        product = tl.where(product <= 0.0, 0.0, product)
    if ACTIVATION == 2:
        product = tl.where(product > 0.0, product, product * slope_of(slope_bits).to(product.dtype))
    return product


@triton.jit
def tile_at(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return a tile's row and column. The order walks GROUP_M rows of tiles by columns, to keep inputs in L2."""
    in_group = GROUP_M * tiles_n
    first = (tile // in_group) * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    return first + (tile % in_group) % rows, (tile % in_group) // rows


@triton.jit
def matmul_kernel(
    a_ptr,  # [m, k], strided
    b_ptr,  # [k, n], strided
    c_ptr,  # [m, n]; [PARTS, m, n] if PARTS > 1
    m,
    n,
    k,
    a_row_stride,
    a_column_stride,
    b_row_stride,
    b_column_stride,
    slope_bits,
    ACTIVATION: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
):
    # One program owns a tile [BLOCK_M, BLOCK_N] of the result, or the sums over one part of its terms.
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0) % (tiles_m * tiles_n) if PARTS > 1 else tl.program_id(0)
    row, column = tile_at(tile, tiles_m, tiles_n, GROUP_M)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    terms = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * a_row_stride + terms.to(tl.int64)[None, :] * a_column_stride
    b_ptrs = b_ptr + terms.to(tl.int64)[:, None] * b_row_stride + columns.to(tl.int64)[None, :] * b_column_stride
    first = 0
    last = k
    if PARTS > 1:
        part = tl.program_id(0) // (tiles_m * tiles_n)
        first = part * tl.cdiv(k, BLOCK_K) // PARTS * BLOCK_K
        last = min((part + 1) * tl.cdiv(k, BLOCK_K) // PARTS * BLOCK_K, k)
        a_ptrs += first.to(tl.int64) * a_column_stride
        b_ptrs += first.to(tl.int64) * b_row_stride
    sums = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for start in range(first, last, BLOCK_K):
        there = terms < k - start
        a = tl.load(a_ptrs, mask=(rows < m)[:, None] & there[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=there[:, None] & (columns < n)[None, :], other=0.0)
        sums = tl.dot(a, b, sums, input_precision=PRECISION, out_dtype=COMPUTE)
        a_ptrs += tl.cast(BLOCK_K, tl.int64) * a_column_stride
        b_ptrs += tl.cast(BLOCK_K, tl.int64) * b_row_stride
    c_ptrs = c_ptr + rows.to(tl.int64)[:, None] * n + columns.to(tl.int64)[None, :]
    if PARTS > 1:
        c_ptrs += part.to(tl.int64) * m * n
        result = sums
    else:
        result = activate(sums, slope_bits, ACTIVATION).to(c_ptr.dtype.element_ty)
    tl.store(c_ptrs, result, mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def matmul_descriptor_kernel(
    a,  # descriptor of [m, k], or of [k, m] if A_TRANSPOSED
    b,  # descriptor of [k, n], or of [n, k] if B_TRANSPOSED
    c,  # descriptor of [m, n], or a pointer to it if not STORE_BY_DESCRIPTOR; to [PARTS, m, n] if PARTS > 1
    m,
    n,
    k,
    slope_bits,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    STORE_BY_DESCRIPTOR: tl.constexpr,
    DTYPE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    HALVES: tl.constexpr,
    PARTS: tl.constexpr,
):
    # One program owns every num_programs-th tile [BLOCK_M, BLOCK_N] of the result. If PARTS > 1, it owns the sums over
    # one part of the terms, which sum_of_parts_kernel adds to those over the others.
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    for item in tl.range(
        tl.program_id(0),
        tiles_m * tiles_n * PARTS,
        tl.num_programs(0),
        flatten=FLATTEN,
        warp_specialize=WARP_SPECIALIZE,
    ):
        row, column = tile_at(item % (tiles_m * tiles_n) if PARTS > 1 else item, tiles_m, tiles_n, GROUP_M)
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        steps = tl.cdiv(k, BLOCK_K)
        first = item // (tiles_m * tiles_n) * steps // PARTS if PARTS > 1 else 0
        last = (item // (tiles_m * tiles_n) + 1) * steps // PARTS if PARTS > 1 else steps
        for step in range(first, last):
            if A_TRANSPOSED:
                left = a.load([step * BLOCK_K, row * BLOCK_M]).T
            else:
                left = a.load([row * BLOCK_M, step * BLOCK_K])
            if B_TRANSPOSED:
                right = b.load([column * BLOCK_N, step * BLOCK_K]).T
            else:
                right = b.load([step * BLOCK_K, column * BLOCK_N])
            sums = tl.dot(left, right, sums)
        if STORE_BY_DESCRIPTOR and HALVES:
            # Half of the tile at a time takes half of the shared memory and leaves room for another stage of loads.
            halves = tl.permute(tl.reshape(sums, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            first, second = tl.split(halves)
            c.store([row * BLOCK_M, column * BLOCK_N], activate(first, slope_bits, ACTIVATION).to(DTYPE))
            c.store(
                [row * BLOCK_M, column * BLOCK_N + BLOCK_N // 2], activate(second, slope_bits, ACTIVATION).to(DTYPE)
            )
        elif STORE_BY_DESCRIPTOR:
            c.store([row * BLOCK_M, column * BLOCK_N], activate(sums, slope_bits, ACTIVATION).to(DTYPE))
        else:
            rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
            columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
            c_ptrs = c + rows.to(tl.int64)[:, None] * n + columns.to(tl.int64)[None, :]
            if PARTS > 1:
                c_ptrs += (item // (tiles_m * tiles_n)).to(tl.int64) * m * n
                result = sums
            else:
                result = activate(sums, slope_bits, ACTIVATION).to(DTYPE)
            tl.store(c_ptrs, result, mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def sum_of_parts_kernel(
    sums_ptr,  # [PARTS, m, n]
    c_ptr,  # [m, n]
    elements,
    slope_bits,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
):
    # One program owns BLOCK_ELEMENTS consecutive elements of the result.
    at = tl.program_id(0).to(tl.int64) * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)
    mask = at < elements
    total = tl.load(sums_ptr + at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums_ptr + tl.cast(elements, tl.int64) * part + at, mask=mask, other=0.0)
    result = activate(total, slope_bits, ACTIVATION).to(c_ptr.dtype.element_ty)
    tl.store(c_ptr + at, result, mask=mask)


@triton.jit
def copy_tile(
    from_ptr,  # [rows, columns], strided
    to_ptr,  # [rows, pitch]: a copy of `from`, or its gradient through the activation of `output`
    output_ptr,  # [rows, columns], used if ACTIVATION
    rows,
    columns,
    row_stride,
    column_stride,
    pitch,
    slope_bits,
    ACTIVATION: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Copy the program's tile [BLOCK_ROWS, BLOCK_COLUMNS] of a matrix, whichever of its axes is dense."""
    tiles = tl.cdiv(pitch, BLOCK_COLUMNS)
    tile = tl.program_id(0)
    row = ((tile // tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    column = ((tile % tiles).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[None, :]
    there = (row < rows) & (column < columns)
    numbers = tl.load(from_ptr + row * row_stride + column * column_stride, mask=there, other=0.0)
    if ACTIVATION > 0:
        output = tl.load(output_ptr + row * columns + column, mask=there, other=0.0).to(COMPUTE)
        grad = numbers.to(COMPUTE)
        if ACTIVATION == 1:
            numbers = tl.where(output <= 0.0, 0.0, grad)
        else:
            numbers = tl.where(output > 0.0, grad, grad * slope_of(slope_bits).to(COMPUTE))
    numbers = numbers.to(to_ptr.dtype.element_ty)
    tl.store(to_ptr + row * pitch + column, numbers, mask=(row < rows) & (column < pitch))


@triton.jit
def copy_rows_kernel(
    output_ptr,  # [rows, columns], used if ACTIVATION
    from_ptr,  # [rows, columns], strided
    to_ptr,  # [rows, pitch]
    from_1_ptr,  # [rows_1, columns_1], strided
    to_1_ptr,  # [rows_1, pitch_1]
    from_2_ptr,  # [rows_2, columns_2], strided
    to_2_ptr,  # [rows_2, pitch_2]
    rows,
    columns,
    row_stride,
    column_stride,
    pitch,
    rows_1,
    columns_1,
    row_stride_1,
    column_stride_1,
    pitch_1,
    rows_2,
    columns_2,
    row_stride_2,
    column_stride_2,
    pitch_2,
    slope_bits,
    ACTIVATION: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # One program owns a tile of the program_id(1)-th copy. The first may be the gradient through an activation.
    if tl.program_id(1) == 0:
        copy_tile(
            from_ptr,
            to_ptr,
            output_ptr,
            rows,
            columns,
            row_stride,
            column_stride,
            pitch,
            slope_bits,
            ACTIVATION,
            COMPUTE,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
        )
    if tl.program_id(1) == 1:
        copy_tile(
            from_1_ptr,
            to_1_ptr,
            to_1_ptr,
            rows_1,
            columns_1,
            row_stride_1,
            column_stride_1,
            pitch_1,
            slope_bits,
            0,
            COMPUTE,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
        )
    if tl.program_id(1) == 2:
        copy_tile(
            from_2_ptr,
            to_2_ptr,
            to_2_ptr,
            rows_2,
            columns_2,
            row_stride_2,
            column_stride_2,
            pitch_2,
            slope_bits,
            0,
            COMPUTE,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
        )


TORCH_COMPUTE = {dtype: torch.float64 if dtype == torch.float64 else torch.float32 for dtype in triton_launch.COMPUTE}
HALF_TYPES = frozenset((torch.float16, torch.bfloat16))


@functools.cache
def has_descriptors(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


def _by_pointers(m: int, n: int, k: int, warps: int, stages: int, parts: int = 1) -> Configuration:
    options = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "num_warps": warps, "num_stages": stages}
    options |= {"PARTS": parts}
    # Tensor cores do not multiply wider types in full precision, so a program's tiles must fit in its registers.
    wider = frozenset(d for d in (torch.float32, torch.float64) if m * n * d.itemsize <= 64 * 1024 and k <= 32)
    name = f"pointers_{m}x{n}x{k}_{warps}_warps_{stages}_stages" + (f"_in_{parts}_parts" if parts > 1 else "")
    return Configuration(name, options, wider if parts > 1 else HALF_TYPES | wider)


def _by_descriptors(
    m: int, n: int, k: int, warps: int, stages: int, halves: bool = False, flatten: bool = True, parts: int = 1
) -> Configuration:
    options = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages, "HALVES": halves}
    options |= {"PARTS": parts}
    # Over all multiprocessors, about as many rows as columns of the result are then in flight.
    options |= {"GROUP_M": 16 if n > m else 8, "FLATTEN": flatten, "WARP_SPECIALIZE": False}
    extra = ("_halves" if halves else "") + ("" if flatten else "_nested")
    extra += f"_in_{parts}_parts" if parts > 1 else ""
    name = f"descriptors_{m}x{n}x{k}_{warps}_warps_{stages}_stages{extra}"
    return Configuration(name, options, HALF_TYPES, has_descriptors, "compute capability 9.0 or later: TMA")


POINTERS = (
    _by_pointers(128, 256, 64, 8, 3),
    _by_pointers(128, 128, 64, 8, 3),
    _by_pointers(128, 128, 32, 8, 3),
    _by_pointers(64, 128, 32, 4, 4),
    _by_pointers(64, 64, 64, 4, 3),
    _by_pointers(64, 64, 32, 4, 3),
    _by_pointers(32, 64, 32, 2, 3),
    _by_pointers(64, 64, 256, 4, 2),
    _by_pointers(32, 32, 64, 4, 4),
    _by_pointers(16, 64, 64, 4, 3),
    _by_pointers(128, 128, 16, 4, 3),
    _by_pointers(128, 64, 16, 4, 3),
    # For small results: the terms of a tile are divided among several programs.
    _by_pointers(64, 64, 32, 4, 3, parts=4),
    _by_pointers(16, 128, 32, 4, 3, parts=8),
    _by_pointers(16, 256, 16, 4, 4, parts=16),
)
DESCRIPTORS = (
    _by_descriptors(128, 256, 64, 8, 4, halves=True),
    _by_descriptors(128, 256, 64, 8, 3),
    _by_descriptors(128, 256, 64, 8, 3, flatten=False),
    _by_descriptors(256, 128, 64, 8, 3),
    _by_descriptors(128, 128, 64, 8, 4),
    _by_descriptors(128, 128, 64, 8, 5, flatten=False),
    _by_descriptors(128, 128, 64, 4, 4),
    _by_descriptors(64, 128, 128, 4, 4, flatten=False),
    _by_descriptors(64, 128, 64, 4, 5, flatten=False, parts=2),
    _by_descriptors(64, 128, 64, 4, 5, flatten=False, parts=4),
    _by_descriptors(64, 64, 64, 4, 6, flatten=False, parts=8),
    _by_descriptors(64, 128, 64, 4, 4),
    _by_descriptors(64, 64, 64, 4, 4),
    _by_descriptors(64, 64, 128, 4, 3),
)
TUNER = Tuner("matmul_triton", (*DESCRIPTORS, *POINTERS), Path(__file__))


def _default(m: int, n: int, k: int, dtype: torch.dtype, descriptors: bool) -> Configuration:
    if triton_launch.INTERPRETED:
        # The interpreter's time depends on the number of steps of a program, not on their size.
        return DESCRIPTORS[-1] if descriptors else POINTERS[7]
    half = dtype in HALF_TYPES
    if m * n <= 256 * 256 and half:
        return POINTERS[8]
    if m * n <= 512 * 512:
        if descriptors:
            return DESCRIPTORS[-2]
        return POINTERS[5] if half or k < MANY_TERMS else POINTERS[12]
    if descriptors:
        return DESCRIPTORS[0]
    return POINTERS[1] if half else POINTERS[3]


def descriptor(rows: torch.Tensor, transposed: bool, block: list[int]) -> TensorDescriptor:
    """Return the descriptor of a matrix with dense rows; `block` is a block of it, or of its transpose."""
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), block[::-1] if transposed else block)


def padded(
    *matrices: torch.Tensor,
    dtype: torch.dtype | None = None,
    output: torch.Tensor | None = None,
    activation: int = 0,
    negative_slope: float = 0.0,
) -> list[torch.Tensor]:
    """Return copies of up to three matrices, whose rows are dense and begin at multiples of 16 bytes, as TMA needs.

    They are of a dtype, if one is given. With the output of an activation, the first is the gradient of its input; the
    first matrix is then the cotangent.
    """
    if not matrices:
        return []
    copies, tensors, numbers, shapes = [], [], [], []
    for matrix in matrices:
        (rows, columns), pitch = matrix.shape, padded_row(matrix)
        copy = torch.empty((rows, pitch), dtype=dtype or matrix.dtype, device=matrix.device)
        copies.append(copy[:, :columns])
        if matrix.is_contiguous() and pitch == columns:
            rows, columns, pitch = 1, matrix.numel(), matrix.numel()
        tensors += [matrix, copy]
        numbers += [rows, columns, *matrix.stride(), pitch]
        shapes.append((rows, pitch))
    lacking = MOST_COPIES - len(copies)
    block_rows = 1 if all(rows == 1 for rows, _ in shapes) else COPIED_ROWS
    block_columns = COPIED_ROWS * COPIED_COLUMNS // block_rows
    triton_launch.launch(
        copy_rows_kernel,
        (max(cdiv(rows, block_rows) * cdiv(pitch, block_columns) for rows, pitch in shapes), len(copies)),
        (tensors[0] if output is None else output, *tensors, *tensors[:2] * lacking),
        (*numbers, *(0,) * 5 * lacking, _slope_bits(negative_slope)),
        ACTIVATION=activation,
        COMPUTE=triton_launch.COMPUTE[matrices[0].dtype] if activation else None,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
    )
    return copies


def _precision_of_float32() -> str:
    return torch.backends.cuda.matmul.fp32_precision


def _slope_bits(slope: float) -> int:
    return struct.unpack("=q", struct.pack("=d", slope))[0]


def _product(a: torch.Tensor, b: torch.Tensor, activation: str, negative_slope: float) -> torch.Tensor:
    (m, k), n, dtype, device = a.shape, b.shape[1], a.dtype, a.device
    c = torch.empty((m, n), dtype=dtype, device=device)
    if m == 0 or n == 0:
        return c
    number = ACTIVATION_NUMBERS[activation]
    # 0 where it has no effect, so that Triton compiles one kernel for all slopes.
    slope_bits = _slope_bits(negative_slope if activation == "leaky_relu" else 0.0)
    dense_a, dense_b = one_axis_dense(a), one_axis_dense(b)
    dense = dense_a is not None and dense_b is not None
    # Rows that no descriptor can describe are copied first, where the product takes long beside that.
    described = dense or (device.type == "cuda" and m * n * k >= LITTLE_WORK)
    wide = dtype not in HALF_TYPES
    precision = "tf32" if dtype == torch.float32 and _precision_of_float32() == "tf32" else "ieee"

    def run(configuration: Configuration) -> None:
        options = configuration.options
        block_m, block_n, block_k = options["BLOCK_M"], options["BLOCK_N"], options["BLOCK_K"]
        tiles, parts = cdiv(m, block_m) * cdiv(n, block_n), options["PARTS"]
        to = c if parts == 1 else torch.empty((parts, m, n), dtype=TORCH_COMPUTE[dtype], device=device)
        if configuration in DESCRIPTORS:
            (rows_of_a, a_transposed), (rows_of_b, b_transposed) = dense_rows(((a, dense_a), (b, dense_b)), padded)
            by_descriptor = parts == 1 and one_axis_dense(c) == 1
            c_block = [block_m, block_n // 2 if options["HALVES"] else block_n]
            triton_launch.launch(
                matmul_descriptor_kernel,
                (min(tiles * parts, triton_launch.multiprocessors(device)),),
                (
                    descriptor(rows_of_a, a_transposed, [block_m, block_k]),
                    descriptor(rows_of_b, b_transposed, [block_k, block_n]),
                    descriptor(c, False, c_block) if by_descriptor else to,
                ),
                (m, n, k, slope_bits),
                A_TRANSPOSED=a_transposed,
                B_TRANSPOSED=b_transposed,
                STORE_BY_DESCRIPTOR=by_descriptor,
                DTYPE=tl.float16 if dtype == torch.float16 else tl.bfloat16,
                ACTIVATION=number,
                **options,
            )
        else:
            # Without tensor cores, adjacent terms are slow to load: such a matrix is transposed first, where that pays.
            left, right = a, b
            if wide and a.stride(1) == 1 != a.stride(0) and n > MANY_COLUMNS and m * k >= MANY_ROWS * MANY_ROWS:
                left = padded(a.t())[0].t()
            if wide and b.stride(0) == 1 != b.stride(1) and m >= MANY_ROWS and n * k >= MANY_ROWS * MANY_ROWS:
                (right,) = padded(b)
            triton_launch.launch(
                matmul_kernel,
                (tiles * parts,),
                (left, right, to),
                (m, n, k, *left.stride(), *right.stride(), slope_bits),
                ACTIVATION=number,
                COMPUTE=triton_launch.COMPUTE[dtype],
                PRECISION=precision,
                **options,
            )
        if parts > 1:
            triton_launch.launch(
                sum_of_parts_kernel,
                (cdiv(c.numel(), BLOCK_ELEMENTS),),
                (to, c),
                (c.numel(), slope_bits),
                PARTS=parts,
                ACTIVATION=number,
                BLOCK_ELEMENTS=BLOCK_ELEMENTS,
            )

    kind = (str(dtype), precision, dense_a, dense_b, a.stride(1) == 1, b.stride(1) == 1)

    def fits(configuration: Configuration) -> bool:
        options = configuration.options
        parts = options["PARTS"]
        # Of many tiles in parts, the sums would take much memory, and no multiprocessor lacks work.
        few = parts == 1 or cdiv(m, options["BLOCK_M"]) * cdiv(n, options["BLOCK_N"]) <= MOST_SHARED
        least = parts - (configuration not in DESCRIPTORS)
        return configuration.serves(dtype, device) and few and least <= cdiv(k, options["BLOCK_K"])

    def default() -> Configuration:
        return _default(m, n, k, dtype, described and fits(DESCRIPTORS[0]))

    with triton_launch.current_device(device):
        run_fastest(TUNER, device, (m, n, k), kind, fits, default, run)
    return c


def depends_on_batch(dtype: str, device: str) -> str | None:
    """Return why a sample depends on its batch: on a GPU all extents, also the number of rows, choose the tiles."""
    return None if device == "cpu" else "the depth of the tiles, which orders the sums, is chosen by all extents"


matmul = register_matmul("triton", _product, padded, has_descriptors, _precision_of_float32)
