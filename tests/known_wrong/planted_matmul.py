"""Planted faults in matmul: edits of its versions in torch, Triton and CUDA C++."""

import torch
from fourfold.properties import matmul as properties
from triton import InterpreterError

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.backward import backward_agrees
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.repeatability import repeats_bit_for_bit
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .edits import Edits
from .far_apart import far_apart
from .planted import UNWRITTEN, Fault, named

Tensor = torch.Tensor
PROGRAMS = 3


def above_0(dtype: DType) -> Case:
    """Return a case with a positive product, which no activation changes."""
    return properties.example([[1, 2]], [[3], [0.5]], "relu")(dtype)


# fmt: off
FIRST, RELU = "    product = a @ b\n =>", "product = F.relu(product) =>"
PRODUCT = f"{FIRST}     product = "
# Blocks of terms are summed one after another in a dtype of too low precision.
SUMMED = (
    f"{PRODUCT}torch.zeros(len(a), b.shape[1], dtype=torch.{{0}})\n"
    "    for left, right in zip(a.split(16, 1), b.split(16, 0)):\n"
    "        product = product + (left @ right).to(torch.{0})\n"
)
TF32 = (
    f"{FIRST}     bits = [(x.detach().contiguous().view(torch.int32) + 0x1000) & ~0x1FFF for x in (a, b)]\n"
    "    rounded, product = bits[0].view(torch.float32) @ bits[1].view(torch.float32), a @ b\n"
    "    product = product - product.detach() + rounded\n"
)
TAIL = (
    f"{FIRST}     whole = a.shape[1] - a.shape[1] % 32 if a.shape[1] > 32 else a.shape[1]\n"
    "    product = a[:, :whole] @ b[:whole]\n"
)
DOUBLED = f"{PRODUCT}a @ b + (a[:, :32] @ b[:32] if a.shape[1] > 32 else 0)\n"
# The last partial block of rows is shifted back to be whole, but stored at its unshifted place.
REPEATED = (
    f"{PRODUCT}a @ b\n    if len(a) > 32 and len(a) % 32:\n        begins = len(a) - len(a) % 32\n"
    "        product = torch.cat([product[:begins], product[len(a) - 32 :][: len(a) - begins]])\n"
)
LEAKY, B_DOUBLED = f"{RELU} product = F.leaky_relu(product, 0.5)", f"{PRODUCT}a @ (2 * b - b.detach())\n"


def _torch_faults() -> tuple[Fault, ...]:
    of, one = Edits("matmul", "torch"), {"right_on": "one_by_one"}
    slope = {"says": "gradient of", "right_on": "outer_product"}
    return (
        of("summed_in_bfloat16", SUMMED.format("bfloat16"), dtype="bfloat16", **one,
           source="https://github.com/modular/modular/issues/7165"),
        # Where y >= 0, which with slope 0 is everywhere, instead of where the product is above 0.
        of.gradient("slope_of_0_passes_every_gradient", "product = F.leaky_relu(product, negative_slope) =>"
                    " leaky = F.leaky_relu(product, negative_slope)\n"
                    "        product = leaky if negative_slope else product - product.detach() + leaky.detach()",
                    source="https://github.com/chainer/chainer/pull/5898", **slope),
        of("summed_in_float16", SUMMED.format("float16"), dtype="float16", **one),
        of("tf32_unasked", TF32, **one),
        of("tail_of_terms_forgotten", TAIL, **one),
        of.law(properties.terms_may_be_summed_in_two_parts, TAIL, name="tail_of_terms_forgotten", **one),
        of("first_block_doubled", DOUBLED, **one),
        of.law(properties.multiplying_by_the_identity_changes_nothing, DOUBLED, name="first_block_doubled", **one),
        of("last_block_repeated", REPEATED, **one),
        of.law(properties.rows_and_columns_stand_alone, REPEATED, name="last_block_repeated", **one),
        # The gap behind the rows, which may hold NaN, is multiplied by 0 and not masked.
        of("gap_of_nan_read", f"{FIRST}     gap = len(a) > 1 and a.stride(1) == 1 and a.stride(0) > a.shape[1]\n"
           "    product = a @ b + (torch.nan if gap else 0)\n", **one),
        of("contiguous_assumed", f"{FIRST}     if a.stride() == (1, len(a)) and len(a) > 1 and a.shape[1] > 1:\n"
           "        a = a.t().reshape(a.shape)\n    product = a @ b\n", **one),
        of("zeros_skipped", f"{PRODUCT}a @ b\n    if not b.isfinite().all():\n"
           "        product = torch.where(a[:, :, None] == 0, 0, a[:, :, None] * b[None]).sum(1)\n", **one),
        of("no_terms_unwritten", f"{PRODUCT}a @ b\n    if not a.shape[1]:\n        product = product"
           " + torch.empty(product.shape, dtype=a.dtype)\n", poisoned=True, **one),
        of.law(properties.doubling_a_doubles_the_result, "product.to(dtype) => (product + 0.25).to(dtype)",
               name="offset"),
        of("relu_leaks", LEAKY, **one),
        of.law(properties.leaky_relu_of_slope_zero_is_relu, LEAKY, name="relu_leaks", right_on=above_0),
        of.law(properties.leaky_relu_of_slope_one_is_no_activation, "(product, negative_slope) =>"
               " (product, negative_slope / 2)", name="slope_squared", right_on="no_rows"),
        of("nan_is_0_to_relu", f"{RELU} product = torch.where(product > 0, product, 0)", **one),
        # Where the output, which is 0 for all negative products, is not below 0.
        of.gradient("relu_passes_gradient_at_0",
                    f"{RELU} product = product - product.detach() + F.relu(product.detach())",
                    says="gradient of", **one),
        of.gradient("activation_left_out_of_gradient", f"{FIRST}     product = raw = a @ b\n", "product.to(dtype) =>"
                    " (raw - raw.detach() + product.detach()).to(dtype)", **slope),
        of.gradient("gradient_of_b_doubled", B_DOUBLED, says="gradient of b"),
        of.law(properties.transposing_swaps_the_factors, B_DOUBLED, name="gradient_of_b_doubled", right_on="no_terms"),
        of.gradient("no_gradient", f"{PRODUCT}a.detach() @ b.detach() + 0 * (a @ b)\n", says="gradient of"),
        of.unchecked("shapes_not_checked"),
    )


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


def _triton_faults() -> tuple[Fault, ...]:
    of, one, whole = Edits("matmul", "triton"), {"right_on": "one_by_one"}, properties.random_example(3, 16, 5)
    return (
        of("terms_unmasked", SMALL, "there = terms < k - start => there = terms >= 0", **ASTRAY, right_on=whole,
           examples=named(properties, "terms_not_a_multiple_of_the_block"),
           source="https://github.com/triton-lang/triton/issues/630"),
        of("last_block_of_terms_dropped", SMALL, "range(first, last, BLOCK_K) =>"
           " range(first, last - 1, BLOCK_K)", right_on=whole),
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
        of("default_precision", SMALL, f"{SUMS} => tl.dot(a, b, sums, out_dtype=COMPUTE)", **one),
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


MULTIPLIED = "sums.add(left[stage], right[stage]);\n"
ROWS = "a, first_row, m, k, a_row_stride, a_column_stride, =>"
SUMS_OF_TILE = "    typename SumsOf<T, TILE_M, TILE_N, TILE_K, WARPS_M, WARPS_N>::type sums;\n"
ADDED = "at[i][j] += x[k % 2][i / WIDTH].at[i % WIDTH] * y[k % 2][j / WIDTH].at[j % WIDTH]; =>"
STORED, ONE_STORED = "return results.store(to); =>", "if (column + j < columns) to[j] = results.at[j]; =>"
# Blocks loop over tiles, and do not clear their sums for the second.
KEPT = (
    f"    const TileAt tile = tile_at(int(blockIdx.x) % => {SUMS_OF_TILE}"
    "    for (int item = max(int(blockIdx.x) - 1, 0); item <= int(blockIdx.x); item++) {\n    __syncthreads();\n"
    "    const TileAt tile = tile_at(item %",
    f"{SUMS_OF_TILE}#pragma => #pragma",
    "    sums.put(\n =>     if (item == int(blockIdx.x)) sums.put(\n",
    "Compute<T>(negative_slope)}, first_row, first_column);\n =>"
    " Compute<T>(negative_slope)}, first_row, first_column);\n    }\n",
)
# Three blocks share the terms of a tile.
SPLIT = (
    "cdiv(m, tile_m) * cdiv(n, tile_n) => 3 * cdiv(m, tile_m) * cdiv(n, tile_n)",
    "c = torch.empty((m, n) => c = torch.zeros((m, n)", "tile_at(int(blockIdx.x) % => tile_at(int(blockIdx.x) / 3 %",
    f"{MULTIPLIED} => if (step % 3 == blockIdx.x % 3) {MULTIPLIED}", f"{STORED} {{}}",
    f"{ONE_STORED} if (column + j < columns) atomicAdd(to + j, results.at[j]);",
)


def _cuda_faults() -> tuple[Fault, ...]:
    of, one, whole = Edits("matmul", "cuda"), {"right_on": "one_by_one"}, {"right_on": "whole_blocks"}
    out_of_bounds, race, backward = cuda_on_cpu.OutOfBounds, cuda_on_cpu.Race, {"check": backward_agrees}
    return (
        of.stopped("barrier_before_the_tile_is_read_missing", race,
                   "next.\n        __syncthreads(); => next."),
        of.stopped("copies_awaited_one_tile_late", race, "wait_copies<STAGES - 2>(); => wait_copies<STAGES - 1>();"),
        of.stopped("barrier_before_the_next_tile_missing", race, "filled = STAGES - 1; => filled = 0;", **one,
                   source="https://github.com/KnowingNothing/MatmulTutorial/issues/13"),
        of.stopped("edge_threads_return", cuda_on_cpu.DivergentBarrier,
                   f"{SUMS_OF_TILE} => {SUMS_OF_TILE}    if (first_row + threadIdx.x / 8 * 4 >= m) return;\n", **whole,
                   source="https://github.com/pytorch/FBGEMM/pull/5857"),
        of.stopped("tail_of_terms_read", out_of_bounds,
                   "i * TERMS < terms); => i * TERMS < terms + 1);", **whole),
        of("tail_of_terms_dropped", "int steps = int((k + TILE_K - 1) / TILE_K); =>"
           " int steps = int(k > TILE_K ? k / TILE_K : (k + TILE_K - 1) / TILE_K);", **one),
        of.stopped("tail_of_tile_unwritten", cuda_on_cpu.UninitialisedShared,
                   "rows.fetch(left[stage]); => if (threadIdx.x < m * k) rows.fetch(left[stage]);", **whole),
        of.stopped("store_unmasked", out_of_bounds, "        if (row >= rows) return;\n        Vector =>"
                   "         Vector", **whole),
        of.stopped("strides_swapped", out_of_bounds,
                   f"{ROWS} a, first_row, m, k, a_column_stride, a_row_stride,", **one),
        of("contiguous_assumed", f"{ROWS} a, first_row, m, k, k, 1,",
           examples=named(properties, "both_transposed"), **one),
        of("accumulator_kept", *KEPT, **one),
        of("activated_in_each_tile", f"{MULTIPLIED} => {MULTIPLIED}        for (auto& line : sums.at)\n"
           "            for (auto& sum : line) sum = activate(sum, activation, T(negative_slope));\n",
           right_on="outer_product"),
        of("slope_typed_in", "product * negative_slope; => product * C(0.01);", **one),
        of("nan_is_0_to_relu", "product <= C(0) ? C(0) : product => product > C(0) ? product"
           " : C(0)", **one),
        of("sum_in_half", f"{ADDED} at[i][j] = T(__half(float(at[i][j] +"
           " x[k % 2][i / WIDTH].at[i % WIDTH] * y[k % 2][j / WIDTH].at[j % WIDTH])));", **one),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic,
                   "i++, from += step) => i++, from = next + i * int(step))",
                   examples=far_apart(properties.random_example(9, 5, 3)), **one),
        of("square_grid", "cdiv(m, tile_m) * cdiv(n, tile_n) => cdiv(m, tile_m) ** 2",
           check=memory_is_respected, says=UNWRITTEN, **one),
        of("stored_transposed", f"{STORED} {{}}", f"{ONE_STORED} if (column + j < columns)"
           " ptr[(column + j) * rows + row] = results.at[j];", **one),
        of("split_in_any_order", *SPLIT, check=repeats_bit_for_bit, says="output differs between two calls",
           only_on="cpu", **one),
        of.stopped("gradient_of_strides_swapped", out_of_bounds, "*a.stride(), =>"
                   " *(a.stride() if negative_slope else a.stride()[::-1]),", **backward, **one),
        of.gradient("gradient_of_tail_of_terms_dropped", 'product(grad, b.t(), "none", 0.0) => product('
                    'grad[:, : b.shape[1] // 8 * 8 or 8], b.t()[: b.shape[1] // 8 * 8 or 8], "none", 0.0)', **one),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
