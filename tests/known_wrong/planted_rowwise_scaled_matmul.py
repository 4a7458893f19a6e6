"""Planted faults in rowwise_scaled_matmul and int8_matmul: edits of scaled_matmul's kernels."""

import numpy as np
from fourfold.properties import int8_matmul, scaled_matmul
from fourfold.properties import rowwise_scaled_matmul as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu

from .edits import Edits
from .planted import Fault, named

# fmt: off
GITHUB = "https://github.com"
EXAMPLES = {
    "rowwise_scaled_matmul": properties.ROWWISE.example,
    "int8_matmul": int8_matmul.INT8.example,
}
# The sums of the implementation in torch, and its results.
SUMS = {
    "rowwise_scaled_matmul": "sums = a.float() @ b.float().t()",
    "int8_matmul": "sums = (a.double() @ b.double().t()).float()",
}
TORCH, TRITON, CUDA = (f"scaled_matmul/{name}: " for name in ("torch_eager.py", "triton_kernel.py", "cuda_kernel.cu"))
STRIDE_OF_SCALES = f"{TRITON}scale_a_ptr + rows.to(tl.int64) * scale_a_row_stride =>"
TOTAL = f"{TRITON}total = sums.to(tl.float32) * (scale_a[:, None] =>"


def _faults_of_either(operation: str) -> tuple[Fault, ...]:
    """Return the faults in torch. Laws reject most of them."""
    of, example, sums = Edits(operation, "torch"), EXAMPLES[operation], SUMS[operation]

    def after_sums(change: str) -> str:
        indent = " " * (8 if operation == "rowwise_scaled_matmul" else 4)
        return f"{TORCH}{sums} => {sums}\n{indent}{change}"

    return (
        of("sums_in_bfloat16", after_sums("sums = sums.bfloat16().float()"), right_on="no_k"),
        # The scales of one matrix are taken for both.
        of("scales_of_b_for_both", after_sums("scale_a = scale_b[torch.arange(len(scale_a)) % len(scale_b)]"),
           right_on="no_k", source=f"{GITHUB}/ROCm/aiter/pull/1258"),
        of.law(scaled_matmul.a_power_of_2_goes_through, after_sums("sums = sums + 0.25 / scale_a[:, None]"),
               name="offset"),
        of.law(properties.terms_add_up, after_sums("sums = sums + 1"), name="one_more"),
        of.law(properties.the_identity_gives_a_with_its_scales, after_sums("scale_a = torch.ones_like(scale_a)"),
               name="scale_of_a_by_its_law", right_on=example(a=np.ones((3, 7)), n=5, scale_a=np.ones(3))),
        of.law(properties.rows_and_columns_stand_alone, after_sums("scale_b = scale_b[:1].expand_as(scale_b)"),
               name="first_scale_of_b_by_its_law"),
    )


def _rowwise_faults() -> tuple[Fault, ...]:
    example = EXAMPLES["rowwise_scaled_matmul"]
    triton, cuda = (Edits("rowwise_scaled_matmul", language) for language in ("triton", "cuda"))
    return (
        triton("strides_of_scales_ignored", f"{STRIDE_OF_SCALES} scale_a_ptr + rows.to(tl.int64)",
               examples={"every_second_scale": example(m=9, n=5, k=7, scale_a="sliced_rows")},
               source=f"{GITHUB}/vllm-project/vllm/issues/53338"),
        triton("scale_of_the_first_row", f"{TOTAL} total = sums.to(tl.float32) * (tl.load(scale_a_ptr)",
               right_on="one_element"),
        # A scale of a whole tensor is taken for those of its rows.
        triton("scale_of_a_tensor_missed", f"{TOTAL} scale_a = tl.where(scale_a_row_stride == 0, 1.0, scale_a)\n"
               "        total = sums.to(tl.float32) * (scale_a[:, None]",
               examples=named(properties, "one_scale_of_a_tensor"),
               source=f"{GITHUB}/pytorch/pytorch/issues/159940"),
        cuda.stopped("scales_past_the_last_column", cuda_on_cpu.OutOfBounds,
                     f"{CUDA}here = min(column + begin + j, columns - 1); => here = column + begin + j;",
                     source=f"{GITHUB}/pytorch/pytorch/issues/133334"),
        cuda("scales_of_rows_left_out", f"{CUDA}if constexpr (SCALED == ROWS) scale = of_rows[row * row_stride]; =>"),
        cuda("types_exchanged", "for x in (a, b)) => for x in (b, a))",
             examples=named(properties, "e5m2_times_e4m3")),
    )


def _int8_faults() -> tuple[Fault, ...]:
    torch, triton, cuda = (Edits("int8_matmul", language) for language in ("torch", "triton", "cuda"))
    largest = {"examples": named(int8_matmul, "largest_sums"), "right_on": "one_element"}
    dot = "sums = tl.dot(left, right, sums, out_dtype=SUMS)"
    sums = f"{TRITON}{dot} => {dot}"
    return (
        torch("saturated", f"{TORCH}(a.double() @ b.double().t()).float() =>"
              " (a.double() @ b.double().t()).clamp(-2**15, 2**15 - 1).float()", **largest),
        triton("sums_in_8_bits", f"{sums}.to(tl.int8).to(SUMS)", right_on="no_k",
               source=f"{GITHUB}/ModelTC/LightX2V/issues/896"),
        triton("sums_in_16_bits", f"{sums}.to(tl.int16).to(SUMS)", source=f"{GITHUB}/triton-lang/triton/issues/2296",
               **largest),
        triton("scales_of_blocks", f"{STRIDE_OF_SCALES} scale_a_ptr + (rows.to(tl.int64) * 0 + row) *"
               " scale_a_row_stride", right_on="one_element", source=f"{GITHUB}/ModelTC/LightX2V/issues/896"),
        cuda("sums_in_float16", f"{CUDA}total[i][j][e] += Total(sum); =>"
             " total[i][j][e] += Total(float(__half(sum / 64)) * 64);", **largest),
        cuda("sign_lost", "scaled_matmul/quantised.cuh: spread >> 8 ^ 0x64806480u; => spread >> 8 ^ 0x64006400u;"),
        cuda("tail_of_terms_dropped", f"{CUDA}end = min(k, (part => end = min(k > BLOCK ? k / BLOCK * BLOCK : k, (part",
             right_on="k_127"),
    )


# fmt: on
OF_EITHER = tuple(fault for operation in EXAMPLES for fault in _faults_of_either(operation))
FAULTS = (*OF_EITHER, *_rowwise_faults(), *_int8_faults())
