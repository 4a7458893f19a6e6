"""Planted faults in matmul: edits of its version in Triton, and small CUDA C++ kernels."""

import functools
from pathlib import Path

import torch
from fourfold.properties import matmul as properties
from triton import InterpreterError

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.backward import backward_agrees
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.repeatability import repeats_bit_for_bit

from .edits import Edits
from .far_apart import far_apart
from .planted import GRADIENT, UNWRITTEN, Fault, cuda_fault, named
from .planted_cuda import Planted
from .planted_matmul import activate, matmul
from .steps import Implementation

Tensor = torch.Tensor


PROGRAMS = 3


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


# fmt: off
ASTRAY = {"raises": InterpreterError, "says": "OutOfBounds", "only_on": "cpu"}
SMALL = "_by_pointers(64, 64, 256, 4, 2) => _by_pointers(16, 16, 16, 4, 2)"
SMALL_DESCRIBED = "_by_descriptors(64, 64, 128, 4, 3) => _by_descriptors(16, 16, 16, 4, 3)"
SUMS = "tl.dot(a, b, sums, input_precision=PRECISION, out_dtype=COMPUTE)"
STRIDES = (
    "    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)\n    terms = =>     {}\n"
    "    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)\n    terms ="
)
MASK = "mask=(rows < m)[:, None] & (columns < n)[None, :])"
END = "\n\n\n@triton.jit\ndef matmul_descriptor_kernel"
ZEROS = "        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n"


def _of_triton() -> tuple[Fault, ...]:
    of, one, whole = Edits("matmul", "triton"), {"right_on": "one_by_one"}, properties.random_example(3, 16, 5)
    return (
        of("terms_unmasked", SMALL, "there = terms < k - start => there = terms >= 0", **ASTRAY, right_on=whole,
           examples=named(properties, "terms_not_a_multiple_of_the_block"),
           source="https://github.com/triton-lang/triton/issues/630"),
        of("last_block_of_terms_dropped", SMALL, "range(0, k, BLOCK_K) => range(0, k - 1, BLOCK_K)", right_on=whole),
        of("last_block_of_terms_only", SMALL, "tl.dot(a, b, sums, => tl.dot(a, b, 0.0 * sums,", **one,
           source="https://github.com/tile-ai/tilelang/issues/2627"),
        of("accumulator_kept", SMALL_DESCRIBED, f"{ZEROS}        steps =>         if item == tl.program_id(0):\n"
           f"    {ZEROS}        steps", dtype="float16", **one,
           source="https://github.com/tile-ai/tilelang/issues/2617"),
        of("stored_to_the_next_tile", SMALL,
           "    c_ptrs = c_ptr + rows =>     rows += BLOCK_M\n    c_ptrs = c_ptr + rows",
           check=memory_is_respected, says=UNWRITTEN, examples=named(properties, "outer_product"),
           source="https://github.com/sgl-project/sglang/pull/11368"),
        of("activated_in_each_block", SMALL, f"{SUMS} => activate({SUMS}, slope_bits, ACTIVATION)",
           right_on="outer_product"),
        of("slope_typed_in", "product * slope_of(slope_bits).to(product.dtype) => product * 0.01",
           examples=named(properties, "slope_of_0"), **one),
        of("nan_is_0_to_relu", "tl.where(product <= 0.0, 0.0, product) => tl.where(product > 0.0, product, 0.0)",
           examples=named(properties, "nan_through_relu"), **one,
           source="https://github.com/pytorch/pytorch/issues/7999"),
        of("half_accumulator", SMALL, f"{SUMS} => {SUMS}.to(tl.float16).to(COMPUTE)", **one),
        of("offsets_in_32_bits", "rows.to(tl.int64)[:, None] * a_row_stride => rows[:, None] * a_row_stride",
           examples=far_apart(properties.random_example(9, 5, 3)), **one),
        of("contiguous_assumed", STRIDES.format(
           "a_row_stride, a_column_stride, b_row_stride, b_column_stride = k, 1, n, 1"),
           examples=named(properties, "both_transposed"), **one),
        of("b_taken_for_its_transpose", STRIDES.format("b_row_stride, b_column_stride = b_column_stride, b_row_stride"),
           **ASTRAY, **one),
        of("rows_unmasked", SMALL, f"{MASK}{END} => mask=(columns < n)[None, :]){END}", check=memory_is_respected,
           says=r"wrote \d+ elements past the end", right_on=properties.random_example(16, 16, 16),
           source="https://github.com/Dao-AILab/flash-attention/pull/2790"),
        of("split_over_uninitialised", f"result, {MASK}{END} => result + tl.load(c_ptrs, {MASK}, {MASK}{END}",
           check=memory_is_respected, says="depending on memory",
           source="https://github.com/triton-lang/triton/issues/2183"),
    )


# fmt: on
def _of_cuda() -> tuple[Fault, ...]:
    of_cuda = functools.partial(cuda_fault, "matmul", in_cuda, right_on="one_by_one")
    out_of_bounds, race = cuda_on_cpu.OutOfBounds, cuda_on_cpu.Race
    written = {"check": memory_is_respected, "says": UNWRITTEN}
    return (
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
            only_on="cpu",
        ),
        of_cuda("gradient_of_strides_swapped", out_of_bounds, check=backward_agrees),
        of_cuda("gradient_of_tail_of_terms_dropped", check=backward_agrees, says=GRADIENT),
    )


FAULTS = (*_of_triton(), *_of_cuda())
