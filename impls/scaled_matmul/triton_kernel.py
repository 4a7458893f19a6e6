"""scaled_matmul, rowwise_scaled_matmul and int8_matmul in Triton: one kernel."""

import functools
from pathlib import Path

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv
from fourfold.backends.triton import launch as triton_launch
from fourfold.backends.tuning import Configuration, Tuner, anywhere, on_gpu

from ..matmul.operators import one_axis_dense, run_fastest
from ..matmul.triton_kernel import depends_on_batch as depends_on_batch
from ..matmul.triton_kernel import descriptor, has_descriptors, padded, tile_at
from .operators import register, scale_strides_of
from .torch_eager import BLOCK as TERMS
from .torch_eager import MOST_TERMS
from .torch_eager import unsupported as unsupported

BLOCK = tl.constexpr(TERMS)
# Rows of tiles that are walked column by column, so that inputs stay in L2.
GROUP_M = tl.constexpr(8)


@triton.jit
def decode(quantised, E5M2: tl.constexpr, IN_INTEGERS: tl.constexpr):
    """Return numbers, or their bits, as float16, which holds them all; int8 numbers as they are if summed in integers.

    The bits of a float8_e5m2 number are the upper ones of a float16. As these, one of float8_e4m3fn is 2^-8 of itself,
    as its exponent is biased by 7 and not by 15, and float16 takes the bits of NaN for a number.
    """
    if IN_INTEGERS:
        numbers = quantised
    elif quantised.dtype == tl.uint8 and E5M2:
        numbers = (quantised.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif quantised.dtype == tl.uint8:
        bits = quantised.to(tl.uint16)
        magnitude = (bits & 0x7F) << 7
        numbers = (magnitude | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
        numbers = tl.where(magnitude == 0x3F80, float("nan"), numbers).to(tl.float16)
    else:
        numbers = quantised.to(tl.float16)
    return numbers


# The products of float16 numbers are exact in float32, in which the tensor cores add them up. Those of float8 numbers
# would be added up twice as fast on Hopper, in 14 bits.
@triton.jit
def scaled_matmul_kernel(
    a,  # [m, k], strided; a descriptor if DESCRIBED
    b,  # [n, k], strided; a descriptor if DESCRIBED, of float8 numbers in float16
    scale_a_ptr,  # [m, ceil(k / BLOCK)], strided; [m] if ROWWISE
    scale_b_ptr,  # [ceil(n / BLOCK), ceil(k / BLOCK)], strided; [n] if ROWWISE
    c_ptr,  # [m, n]
    m,
    n,
    k,
    a_row_stride,
    a_column_stride,
    b_row_stride,
    b_column_stride,
    scale_a_row_stride,
    scale_a_column_stride,
    scale_b_row_stride,
    scale_b_column_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_INTEGERS: tl.constexpr,
    ROWWISE: tl.constexpr,
    A_E5M2: tl.constexpr,
    B_E5M2: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    # One program owns a tile [BLOCK_M, BLOCK_N] of the result, whose columns share a scale of each block of terms. If
    # ROWWISE, each row and each column has one scale.
    row, column = tile_at(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    terms = tl.arange(0, BLOCK_K)
    if not DESCRIBED:
        a_ptrs = a + rows.to(tl.int64)[:, None] * a_row_stride + terms.to(tl.int64)[None, :] * a_column_stride
        b_ptrs = b + terms.to(tl.int64)[:, None] * b_column_stride + columns.to(tl.int64)[None, :] * b_row_stride
    scale_a_ptrs = scale_a_ptr + rows.to(tl.int64) * scale_a_row_stride
    if not ROWWISE:
        scale_b_ptr += ((column * BLOCK_N) // BLOCK).to(tl.int64) * scale_b_row_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    SUMS: tl.constexpr = tl.int32 if IN_INTEGERS else tl.float32
    sums = tl.zeros((BLOCK_M, BLOCK_N), SUMS)
    for step in range(tl.cdiv(k, BLOCK_K)):
        if DESCRIBED:
            left = decode(a.load([row * BLOCK_M, step * BLOCK_K]), A_E5M2, IN_INTEGERS)
            right = b.load([column * BLOCK_N, step * BLOCK_K]).T
        else:
            there = terms < k - step * BLOCK_K
            left = tl.load(a_ptrs, mask=(rows < m)[:, None] & there[None, :], other=0.0)
            right = tl.load(b_ptrs, mask=there[:, None] & (columns < n)[None, :], other=0.0)
            left, right = decode(left, A_E5M2, IN_INTEGERS), decode(right, B_E5M2, IN_INTEGERS)
            a_ptrs += tl.cast(BLOCK_K, tl.int64) * a_column_stride
            b_ptrs += tl.cast(BLOCK_K, tl.int64) * b_column_stride
        sums = tl.dot(left, right, sums, out_dtype=SUMS)
        ends_block = BLOCK_K == BLOCK or (step + 1) % (BLOCK // BLOCK_K) == 0 or (step + 1) * BLOCK_K >= k
        if not ROWWISE and ends_block:
            scale_a = tl.load(scale_a_ptrs, mask=rows < m, other=0.0)
            total += sums * (scale_a * tl.load(scale_b_ptr))[:, None]
            sums = tl.zeros((BLOCK_M, BLOCK_N), SUMS)
            scale_a_ptrs += scale_a_column_stride
            scale_b_ptr += scale_b_column_stride
    if ROWWISE:
        scale_a = tl.load(scale_a_ptrs, mask=rows < m, other=0.0)
        scale_b = tl.load(scale_b_ptr + columns.to(tl.int64) * scale_b_row_stride, mask=columns < n, other=0.0)
        total = sums.to(tl.float32) * (scale_a[:, None] * scale_b[None, :])
    c_ptrs = c_ptr + rows.to(tl.int64)[:, None] * n + columns.to(tl.int64)[None, :]
    tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@functools.cache
def _converts_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _converts_float8_or_is_interpreted(device: torch.device) -> bool:
    return device.type == "cpu" or _converts_float8(device)


def _tiles(m: int, n: int, k: int, warps: int, stages: int, on_cpu: bool = False, bits: bool = False) -> Configuration:
    assert BLOCK.value % n == BLOCK.value % k == 0
    options = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}
    name, needs = f"{m}x{n}x{k}_{warps}_warps_{stages}_stages", "a GPU; the CPU runs one like it"
    if bits:
        return Configuration(f"bits_{name}", options, runs_on=anywhere if on_cpu else on_gpu, needs=needs)
    needs = "compute capability 8.9 or later: an instruction that converts float8"
    runs_on = _converts_float8_or_is_interpreted if on_cpu else _converts_float8
    return Configuration(name, options, runs_on=runs_on, needs=needs)


# Where the hardware converts float8. On the CPU one runs of those with one step a block of terms, and that with two.
CONVERTING = (
    _tiles(128, 128, 128, 8, 3),
    _tiles(128, 128, 128, 8, 4),
    _tiles(128, 128, 64, 8, 4, on_cpu=True),
    _tiles(64, 128, 128, 4, 3),
    _tiles(64, 64, 128, 4, 4),
    _tiles(32, 64, 128, 4, 4),
    _tiles(16, 64, 128, 4, 4),
    _tiles(16, 32, 128, 4, 5, on_cpu=True),
)
# Where there is TMA. b is converted to float16 before, because the tensor cores take it from shared memory; a is
# converted in registers. Two programs share a multiprocessor: one multiplies while the other converts and scales.
DESCRIBED = Configuration(
    "descriptors_64x128x128_4_warps_3_stages",
    CONVERTING[3].options,
    runs_on=has_descriptors,
    needs="compute capability 9.0 or later: TMA",
)
# Where no instruction converts them, and numbers are converted bit by bit.
BITS = (
    _tiles(128, 128, 64, 8, 3, bits=True),
    _tiles(64, 64, 128, 4, 3, on_cpu=True, bits=True),
    _tiles(16, 64, 128, 4, 3, bits=True),
)
TUNER = Tuner("scaled_matmul_triton", (DESCRIBED, *CONVERTING, *BITS), Path(__file__))


def _default(m: int, n: int, device: torch.device) -> Configuration:
    if _converts_float8(device):
        few, middle, many = CONVERTING[6], CONVERTING[4], DESCRIBED if has_descriptors(device) else CONVERTING[0]
    else:
        many, middle, few = BITS
    if device.type == "cpu" or 16 < m <= 512 * 512 // n:
        return middle
    return few if m <= 16 else many


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if one_axis_dense(matrix) == 1 else padded(matrix)[0]


def _launch(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, output: torch.Tensor
) -> None:
    (m, k), n, device = a.shape, b.shape[0], a.device
    rowwise, in_integers = scale_a.ndim == 1, a.dtype == torch.int8 and k <= MOST_TERMS

    def run(configuration: Configuration) -> None:
        options = configuration.options
        grid = (cdiv(m, options["BLOCK_M"]) * cdiv(n, options["BLOCK_N"]),)
        scalars = (m, n, k, *a.stride(), *b.stride(), *scale_strides_of(scale_a, scale_b))
        described = configuration is DESCRIBED and k > 0  # no descriptor is of nothing
        if described:
            columns = _dense(b) if in_integers else padded(b, dtype=torch.float16)[0]
            left = descriptor(_dense(a), False, [options["BLOCK_M"], options["BLOCK_K"]])
            right = descriptor(columns, False, [options["BLOCK_N"], options["BLOCK_K"]])
        else:
            by_bits = configuration in BITS and a.dtype != torch.int8
            left, right = (x.view(torch.uint8) for x in (a, b)) if by_bits else (a, b)
        triton_launch.launch(
            scaled_matmul_kernel,
            grid,
            (left, right, scale_a, scale_b, output),
            scalars,
            IN_INTEGERS=in_integers,
            ROWWISE=rowwise,
            A_E5M2=a.dtype == torch.float8_e5m2,
            B_E5M2=b.dtype == torch.float8_e5m2,
            DESCRIBED=described,
            **options,
        )

    def fits(configuration: Configuration) -> bool:
        return configuration.serves(output.dtype, device)

    def default() -> Configuration:
        return _default(m, n, device)

    kind = (str(output.dtype), str(a.dtype), str(b.dtype), rowwise, a.stride(1) == 1, b.stride(1) == 1)
    with triton_launch.current_device(device):
        run_fastest(TUNER, device, (m, n, k), kind, fits, default, run)


scaled_matmul, rowwise_scaled_matmul, int8_matmul = register("triton", _launch)
