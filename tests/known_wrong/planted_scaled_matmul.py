"""Planted faults in scaled_matmul: edits of its versions in torch, Triton and CUDA C++."""

from collections.abc import Callable

import numpy as np
import torch
from fourfold.impls.scaled_matmul.torch_eager import BLOCK
from fourfold.impls.scaled_matmul.torch_eager import scaled_matmul as definition
from fourfold.properties import scaled_matmul as properties
from fourfold.properties.scaled_matmul import rows

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.signature import signature_of
from fourfold.checks.memory import memory_is_respected

from .edits import Edits
from .far_apart import far_apart
from .planted import UNWRITTEN, Fault, Implementation, named

Tensor = torch.Tensor


def checked(product: Callable[..., Tensor]) -> Implementation:
    return signature_of(definition).checked(lambda *given: product(*given[:-1]).to(given[-1]))


def dequantised(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Multiply the scaled numbers with a library, which is right in float32."""
    of_terms = torch.arange(a.shape[1], device=a.device) // BLOCK
    left = a.float() * scale_a[:, of_terms]
    return left @ (b.float() * scale_b.repeat_interleave(BLOCK, 0)[: len(b)][:, of_terms]).t()


# fmt: off
SUMS = "sums = left[:, start : start + BLOCK] @ right[:, start : start + BLOCK].t() =>"
# A sum of few terms at a time, each of which is rounded to bfloat16.
BFLOAT16 = (
    f"{SUMS} sums = torch.zeros((m, n), dtype=torch.bfloat16, device=a.device)\n"
    "            for at in range(start, min(start + BLOCK, k), 16):\n"
    "                sums += (left[:, at : at + 16] @ right[:, at : at + 16].t()).bfloat16()"
)
# Like Hopper's float8 tensor cores: 32 products and the sum so far, aligned to the largest, keep 14 bits each.
IN_14_BITS = (
    f"{SUMS} sums = torch.zeros((m, n), dtype=torch.float64, device=a.device)\n"
    "            for at in range(start, min(start + BLOCK, k), 32):\n"
    "                terms = left[:, None, at : at + 32].double() * right[None, :, at : at + 32]\n"
    "                terms = torch.cat([terms, sums[..., None]], -1)\n"
    "                unit = torch.ldexp(torch.ones_like(sums), torch.frexp(terms.abs().amax(-1)).exponent - 14)\n"
    "                sums = torch.trunc(terms / unit[..., None]).sum(-1) * unit\n"
    "            sums = sums.float()"
)
# Numbers times their scales are rounded to bfloat16, and multiplied by a library.
DEQUANTISED = (
    "left, right = a.float(), b.float() => of_terms = torch.arange(k, device=a.device) // BLOCK\n"
    "        left = (a.float() * scale_a[:, of_terms]).bfloat16().float()\n"
    "        right = (b.float() * scale_b.repeat_interleave(BLOCK, 0)[:n][:, of_terms]).bfloat16().float()",
    "sums * (scale_a[:, p : p + 1] * scale_of_columns[p]) => sums",
)
# Scales of a are rounded up to powers of 2, which the tensor cores of the next generation take.
POWERS_OF_2 = (
    "        left, right = a =>         fraction, exponent = torch.frexp(scale_a)\n"
    "        exponent = torch.where(fraction == 0.5, exponent - 1, exponent)\n"
    "        scale_a = torch.where(scale_a > 0, torch.ldexp(torch.ones_like(scale_a), exponent), scale_a)\n"
    "        left, right = a"
)
FIRST_SCALE = "scale_b.repeat_interleave( => scale_b[:1, :1].expand_as(scale_b).repeat_interleave("


def _torch_faults() -> tuple[Fault, ...]:
    of, one = Edits("scaled_matmul", "torch"), {"right_on": "k_127"}
    return (
        of("in_bfloat16", BFLOAT16, right_on="one_element"),
        of("in_14_bits", IN_14_BITS, right_on="one_element",
           source="https://github.com/deepseek-ai/DeepGEMM/issues/37"),
        of("dequantised_to_bfloat16", *DEQUANTISED, right_on="no_k"),
        of("dequantised_to_bfloat16_for_bfloat16", *DEQUANTISED, right_on="no_k", dtype="bfloat16"),
        of("one_scale_of_all", FIRST_SCALE, **one),
        # The memory of the scales of a is read column by column.
        of("scales_transposed", "(scale_a[:, p : p + 1] =>"
           " (scale_a.contiguous().view(scale_a.shape[::-1]).t()[:, p : p + 1]", **one),
        of("saturated", "a.float(), b.float() => a.float().nan_to_num(448.0), b.float().nan_to_num(448.0)", **one),
        of("scales_in_powers_of_2", POWERS_OF_2, right_on="no_k"),
        of.law(properties.a_power_of_2_goes_through, "return total.to( => return (total + 0.25).to(", name="offset"),
        # A pipeline that ends late adds the last of several blocks of terms twice.
        of.law(properties.blocks_of_terms_add_up, "sums * (scale_a[:, p => (1 + (0 < p and k <= start + BLOCK)) * sums"
               " * (scale_a[:, p", name="last_block_twice", **one),
        of.law(properties.the_identity_gives_a_with_its_scales, POWERS_OF_2, name="scales_in_powers_of_2_by_its_law",
               right_on=rows(3, 5, 7, scale_a=np.ones((3, 1)))),
        of.law(properties.blocks_of_columns_stand_alone, FIRST_SCALE, name="first_scale_of_b_by_its_law", **one),
        of.unchecked("arguments_not_checked", times=3),
    )


HALF_BLOCKS = "_tiles(64, 64, 128, 4, 3, on_cpu=True, => _tiles(64, 64, 64, 4, 3, on_cpu=True,"
STEP = "            scale_a_ptrs += scale_a_column_stride\n            scale_b_ptr += scale_b_column_stride\n =>"
TOTAL = "total += sums * (scale_a * tl.load(scale_b_ptr))[:, None] =>"
NAN = 'numbers = tl.where(magnitude == 0x3F80, float("nan"), numbers)'


def _triton_faults() -> tuple[Fault, ...]:
    of, one, none = Edits("scaled_matmul", "triton"), {"right_on": "k_127"}, {"right_on": "no_k"}
    return (
        of("first_scale_of_all_blocks", STEP, source="https://github.com/mlc-ai/TIRx-kernels/pull/5", **one),
        of("step_is_the_block", HALF_BLOCKS, f"{STEP}         last = tl.cdiv(k, BLOCK) - 1\n"
           "        more = tl.minimum(step + 1, last) - tl.minimum(step, last)\n"
           "        scale_a_ptrs += more * scale_a_column_stride\n"
           "        scale_b_ptr += more * scale_b_column_stride\n",
           source="https://github.com/tile-ai/TileOPs/pull/1666", **one),
        of("last_scale_not_applied", HALF_BLOCKS, "(step + 1) * BLOCK_K >= k => k - step * BLOCK_K < BLOCK_K",
           examples={"half_a_block": rows(3, 5, 192)}, source="https://github.com/pytorch/FBGEMM/issues/6159", **one),
        of("first_columns_scale", "((column * BLOCK_N) // BLOCK).to(tl.int64) * => 0 *", **one),
        of("nan_is_480", f"{NAN} => numbers = numbers", examples=named(properties, "nan_of_each_sign"),
           source="https://github.com/ml-explore/mlx/pull/4164", **one),
        of("subnormal_is_0", f"{NAN} => numbers = tl.where((bits & 0x78) == 0, 0.0, numbers)\n        {NAN}", **none),
        of("e5m2_read_as_e4m3", "tl.uint8 and E5M2: => tl.uint8 and not E5M2 and E5M2:",
           examples=named(properties, "e5m2")),
        of("sign_dropped", "(magnitude | ((bits & 0x80) << 8)) => magnitude", **none),
        of("total_in_bfloat16", f"{TOTAL} total = (total + sums * (scale_a * tl.load(scale_b_ptr))[:, None]).to("
           "tl.bfloat16).to(tl.float32)", **none),
        of("offsets_in_32_bits", "rows.to(tl.int64)[:, None] * a_row_stride => rows[:, None] * a_row_stride",
           examples=far_apart(rows(9, 5, 7)), **one),
    )


def _cuda_faults() -> tuple[Fault, ...]:
    of, one, github = Edits("scaled_matmul", "cuda"), {"right_on": "k_127"}, "https://github.com"
    return (
        of.stopped("store_unmasked", cuda_on_cpu.OutOfBounds,
                   "scaled_matmul/cuda_kernel.cu:         if (row >= rows) return;\n =>"),
        of("last_block_dropped",
           "sums], cdiv(m, rows) * cdiv(n, columns) => sums], max(cdiv(m, rows) * cdiv(n, columns) - 1, 1)",
           check=memory_is_respected, says=UNWRITTEN, right_on="one_element"),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic,
                   "ptr + position * stride => ptr + int(position) * int(stride)", examples=far_apart(rows(9, 5, 7)),
                   **one),
        of("tail_of_terms_dropped", "end = min(k, (part => end = min(k > BLOCK ? k / BLOCK * BLOCK : k, (part",
           source=f"{github}/NVIDIA/cutlass/issues/3536", **one),
        of("scales_by_launch_coordinates", "of_rows[position * => of_rows[blockIdx.x % rows *",
           source=f"{github}/NVIDIA/cutlass/pull/3394", right_on="one_element"),
        of("each_half_begins_at_the_first_scale", 
           "next / BLOCK); => next / BLOCK % (((k + BLOCK - 1) / BLOCK + 1) / 2));",
           source=f"{github}/NVIDIA/cutlass/pull/3615", **one),
        of("blocks_of_equal_width", "scale_b + first_column / BLOCK * =>"
           " scale_b + first_column * ((n + BLOCK - 1) / BLOCK) / n *",
           source=f"{github}/vllm-project/vllm/pull/49596", **one),
        of("types_exchanged", "for x in (a, b)) => for x in (b, a))",
           examples=named(properties, "e5m2_times_e4m3")),
        of("e4m3_misread", "(spread & 0x7f007f00u) >> 1; => spread & 0x7f007f00u;", "__half(256.0f) => __half(1.0f)",
           "pair |= (nan << 1) - (nan >> 5); =>", right_on="no_k"),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
