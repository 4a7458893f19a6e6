"""Planted faults in matmul, in small Triton and CUDA C++ kernels."""

from pathlib import Path

import torch
import triton
import triton.language as tl
from fourfold.properties import matmul as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.repeatability import repeats_bit_for_bit

from .far_apart import far_apart
from .planted import GRADIENT, UNWRITTEN, Fault, kernel_faults, named
from .planted_cuda import Planted
from .planted_matmul import activate, matmul
from .steps import Implementation

Tensor = torch.Tensor


@triton.jit
def activated(x, ACTIVATION: tl.constexpr, slope, FAULT: tl.constexpr):
    if ACTIVATION == "relu":
        if FAULT == "nan_is_0_to_relu":
            x = tl.where(x > 0, x, 0.0)
        else:
            x = tl.where(x <= 0, 0.0, x)
    if ACTIVATION == "leaky_relu":
        x = tl.where(x > 0, x, x * slope)
    return x


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, m, k, n, a_row, a_col, b_row, b_col, slope,
    ACTIVATION: tl.constexpr, FAULT: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program owns tiles program, program + programs, ... of BLOCK x BLOCK elements, in row-major order.
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    across = tl.cdiv(n, BLOCK)
    tiles = tl.cdiv(m, BLOCK) * across
    slope = tl.full((), slope, COMPUTE)
    if FAULT == "slope_typed_in":
        slope = tl.full((), 0.01, COMPUTE)
    if FAULT == "b_taken_for_its_transpose":
        b_row, b_col = b_col, b_row
    if FAULT == "contiguous_assumed":
        a_row, a_col, b_row, b_col = k, 1, n, 1
    end = k
    if FAULT == "last_block_of_terms_dropped":
        end = k - 1
    if FAULT == "half_accumulator":
        total = tl.zeros((BLOCK, BLOCK), tl.float16)
    else:
        total = tl.zeros((BLOCK, BLOCK), COMPUTE)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = (tile // across) * BLOCK + lanes
        cols = (tile % across) * BLOCK + lanes
        if FAULT == "offsets_in_32_bits":
            rows = rows.to(tl.int32)
        if FAULT != "accumulator_kept":
            total = tl.zeros((BLOCK, BLOCK), total.dtype)
        for start in range(0, end, BLOCK):
            terms = start + lanes
            of_a = (rows[:, None] < m) & (terms[None, :] < k)
            of_b = (terms[:, None] < k) & (cols[None, :] < n)
            if FAULT == "terms_unmasked":
                of_a = (rows[:, None] < m) & (terms[None, :] >= 0)
                of_b = (terms[:, None] >= 0) & (cols[None, :] < n)
            a = tl.load(a_ptr + rows[:, None] * a_row + terms[None, :] * a_col, mask=of_a, other=0.0)
            b = tl.load(b_ptr + terms[:, None] * b_row + cols[None, :] * b_col, mask=of_b, other=0.0)
            part = tl.dot(a.to(COMPUTE), b.to(COMPUTE), input_precision="ieee", out_dtype=COMPUTE)
            if FAULT == "last_block_of_terms_only":
                total = part
            else:
                total += part.to(total.dtype)
            if FAULT == "activated_in_each_block":
                total = activated(total, ACTIVATION, slope, FAULT)
        c = activated(total, ACTIVATION, slope, FAULT).to(c_ptr.dtype.element_ty)
        if FAULT == "stored_to_the_next_tile":
            after = tile + tl.num_programs(0)
            rows = (after // across) * BLOCK + lanes
            cols = (after % across) * BLOCK + lanes
        if FAULT == "rows_unmasked":
            tl.store(c_ptr + rows[:, None] * n + cols[None, :], c, mask=cols[None, :] < n)
        else:
            tl.store(c_ptr + rows[:, None] * n + cols[None, :], c, mask=(rows[:, None] < m) & (cols[None, :] < n))


@triton.jit
def split_kernel(a_ptr, b_ptr, c_ptr, m, k, n, a_row, a_col, b_row, b_col, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    # A program's first index selects one tile, its second index every second block of terms.
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    across = tl.cdiv(n, BLOCK)
    rows = (tl.program_id(0) // across) * BLOCK + lanes
    cols = (tl.program_id(0) % across) * BLOCK + lanes
    total = tl.zeros((BLOCK, BLOCK), COMPUTE)
    for start in range(tl.program_id(1) * BLOCK, k, tl.num_programs(1) * BLOCK):
        terms = start + lanes
        of_a = (rows[:, None] < m) & (terms[None, :] < k)
        of_b = (terms[:, None] < k) & (cols[None, :] < n)
        a = tl.load(a_ptr + rows[:, None] * a_row + terms[None, :] * a_col, mask=of_a, other=0.0).to(COMPUTE)
        b = tl.load(b_ptr + terms[:, None] * b_row + cols[None, :] * b_col, mask=of_b, other=0.0).to(COMPUTE)
        total += tl.dot(a, b, input_precision="ieee", out_dtype=COMPUTE)
    tl.atomic_add(c_ptr + rows[:, None] * n + cols[None, :], total, mask=(rows[:, None] < m) & (cols[None, :] < n))


PROGRAMS = 3


def in_triton(fault: str = "") -> Implementation:
    """Return the product in Triton for any dtype, with a fault."""

    def product(a: Tensor, b: Tensor, activation: str, slope: float) -> Tensor:
        (m, k), n = a.shape, b.shape[1]
        split = fault == "split_over_uninitialised"
        c = torch.empty((m, n), dtype=a.dtype, device=a.device)
        tiles = triton.cdiv(m, 16) * triton.cdiv(n, 16)
        compute = triton_launch.COMPUTE[a.dtype]
        if not tiles:
            return c
        with triton_launch.on(a.device):
            if split:
                split_kernel[(tiles, 2)](a, b, c, m, k, n, *a.stride(), *b.stride(), COMPUTE=compute, BLOCK=16)
                return activate(c, activation, slope)
            matmul_kernel[(min(tiles, PROGRAMS),)](
                a, b, c, m, k, n, *a.stride(), *b.stride(), slope,
                ACTIVATION=activation, FAULT=fault, COMPUTE=compute, BLOCK=16,
            )  # fmt: skip
        return c

    return multiplied_by(product, fault)


def multiplied_by(product, fault: str) -> Implementation:
    """Return matmul with its output, or for a gradient fault its gradient, by ``product(a, b, activation, slope)``."""
    if not fault.lower().startswith("gradient"):
        return matmul(fused=product)

    def gradients(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return product(grad, b.t(), "none", 0.0), product(a.t(), grad, "none", 0.0)

    return matmul(grads=gradients)


KERNELS = Planted(Path(__file__).parent / "planted_matmul.cu", "matmul_kernel", "split_kernel")
TILE = 8
ACTIVATIONS = ("none", "relu", "leaky_relu")


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return the product in CUDA C++ for float32, with a fault."""

    def product(a: Tensor, b: Tensor, activation: str, slope: float) -> Tensor:
        (m, k), n = a.shape, b.shape[1]
        strides = *a.stride(), *b.stride()
        if fault == "SPLIT_IN_ANY_ORDER":
            c = torch.zeros((m, n), device=a.device)
            KERNELS.launch("split_kernel", "NONE", (-(-m * n // 64), 3), 64, a, b, c, m, k, n, *strides)
            return activate(c, activation, slope)
        c = torch.empty((m, n), device=a.device)
        tiles = -(-m // TILE) * -(-n // TILE)
        which = fault.removeprefix("GRADIENT_OF_")
        KERNELS.launch(
            "matmul_kernel", which, min(tiles, PROGRAMS), (TILE, TILE),
            a, b, c, m, k, n, *strides, tiles, ACTIVATIONS.index(activation), slope,
        )  # fmt: skip
        return c

    return multiplied_by(product, fault)


def _faults() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("matmul", in_triton, in_cuda, right_on="one_by_one")
    out_of_bounds, race = cuda_on_cpu.OutOfBounds, cuda_on_cpu.Race
    written = {"check": memory_is_respected, "says": UNWRITTEN}

    return (
        of_triton(
            "terms_unmasked",
            astray=True,
            right_on=properties.random_example(3, 16, 5),
            examples=named(properties, "terms_not_a_multiple_of_the_block"),
            source="https://github.com/triton-lang/triton/issues/630",
        ),
        of_triton("last_block_of_terms_dropped", right_on=properties.random_example(3, 16, 5)),
        of_triton("last_block_of_terms_only", source="https://github.com/tile-ai/tilelang/issues/2627"),
        of_triton("accumulator_kept", source="https://github.com/tile-ai/tilelang/issues/2617"),
        of_triton(
            "stored_to_the_next_tile",
            **written,
            right_on=None,
            examples=named(properties, "outer_product"),
            source="https://github.com/sgl-project/sglang/pull/11368",
        ),
        of_triton("activated_in_each_block", right_on="outer_product"),
        of_triton("slope_typed_in", examples=named(properties, "slope_of_0")),
        of_triton(
            "nan_is_0_to_relu",
            examples=named(properties, "nan_through_relu"),
            source="https://github.com/pytorch/pytorch/issues/7999",
        ),
        of_triton("half_accumulator"),
        of_triton("offsets_in_32_bits", examples=far_apart(properties.random_example(9, 5, 3))),
        of_triton("contiguous_assumed", examples=named(properties, "both_transposed")),
        of_triton("b_taken_for_its_transpose", astray=True),
        of_triton(
            "rows_unmasked",
            check=memory_is_respected,
            says=r"wrote \d+ elements past the end",
            right_on="no_rows",
            source="https://github.com/Dao-AILab/flash-attention/pull/2790",
        ),
        of_triton(
            "split_over_uninitialised",
            **written | {"says": "depending on memory"},
            right_on=None,
            source="https://github.com/triton-lang/triton/issues/2183",
        ),
        of_cuda("barrier_before_the_tile_is_read_missing", race, right_on=None),
        of_cuda(
            "barrier_before_the_next_tile_missing",
            race,
            source="https://github.com/KnowingNothing/MatmulTutorial/issues/13",
        ),
        of_cuda(
            "edge_threads_return",
            cuda_on_cpu.DivergentBarrier,
            right_on="whole_blocks",
            source="https://github.com/pytorch/FBGEMM/pull/5857",
        ),
        of_cuda("tail_of_terms_read", out_of_bounds, right_on="whole_blocks"),
        of_cuda("tail_of_terms_dropped"),
        of_cuda("tail_of_tile_unwritten", cuda_on_cpu.UninitialisedShared, right_on="whole_blocks"),
        of_cuda("store_unmasked", out_of_bounds, right_on="whole_blocks"),
        of_cuda("strides_swapped", out_of_bounds),
        of_cuda("contiguous_assumed", examples=named(properties, "both_transposed")),
        of_cuda("accumulator_kept"),
        of_cuda("activated_in_each_tile", right_on="outer_product"),
        of_cuda("slope_typed_in"),
        of_cuda("nan_is_0_to_relu"),
        of_cuda("sum_in_half"),
        of_cuda(
            "offsets_in_32_bits",
            cuda_on_cpu.UndefinedArithmetic,
            examples=far_apart(properties.random_example(9, 5, 3)),
        ),
        of_cuda("square_grid", **written),
        of_cuda("stored_transposed"),
        of_cuda(
            "split_in_any_order",
            check=repeats_bit_for_bit,
            says="output differs between two calls",
            only_on_cpu=True,
        ),
        of_cuda("gradient_of_strides_swapped", out_of_bounds, check=backward_agrees),
        of_cuda("gradient_of_tail_of_terms_dropped", check=backward_agrees, says=GRADIENT),
    )


FAULTS = _faults()
