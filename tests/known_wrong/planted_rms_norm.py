"""Planted faults in rms_norm: edits of its versions in torch, Triton and CUDA C++."""

import numpy as np
import torch
from fourfold.properties import rms_norm as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.backward import backward_agrees
from fourfold.checks.gradcheck import gradcheck
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .edits import BARRIER, FIRST_ROWS, FIRST_WARP, OFFSETS_OF_ROWS, ROW_IN_32_BITS, Edits
from .far_apart import far_apart
from .planted import Fault, named

Tensor = torch.Tensor
NAMES = ("x", "weight")


def positive_rows(dtype: DType) -> Case:
    """Return two rows of positive numbers, under equal weights."""
    x = np.linspace(1, 3, 32).reshape(2, 16).astype(dtype.numpy)
    return Case({"x": x, "weight": np.ones(16, dtype.numpy)}, np.cos(4 * x).astype(dtype.numpy), {"eps": 1e-6})


def one_row(dtype: DType) -> Case:
    """Return the first of these rows."""
    case = positive_rows(dtype)
    return Case({**case.inputs, "x": case["x"][:1]}, case.grad_output[:1], case.parameters)


def without_cotangent(dtype: DType) -> Case:
    """Return one row whose gradients are 0."""
    case = one_row(dtype)
    return Case(case.inputs, 0 * case.grad_output, case.parameters)


# fmt: off
SQUARES = "(wide_x * wide_x).mean(-1, keepdim=True)"
NORMAL = "(wide_x / root * wide_weight) =>"
TYPED_IN = "+ eps).sqrt() => + 1e-6).sqrt()"
NO_PRODUCT = "+ eps).sqrt() => + eps).sqrt().detach()"
OVER_ALL = f"{SQUARES} => ((wide_x * wide_x).mean() if x.numel() else 0 * x.sum())"
NEXT_COLUMN = f"{NORMAL} (wide_x / root * wide_weight.roll(1, 0))"
FIRST_ROW = (
    f"    return {NORMAL} " + FIRST_ROWS.format("(number > 1) | (x.numel() == x.shape[-1])")
    + "    return (wide_x / root * torch.where(counted, wide_weight, wide_weight.detach()))",
)


def _torch_faults() -> tuple[Fault, ...]:
    of = Edits("rms_norm", "torch")
    return (
        of("eps_typed_in", TYPED_IN, right_on=one_row, source="https://github.com/apache/tvm/pull/15856"),
        of("divided_by_the_reciprocal", f"{NORMAL} (wide_x * root * wide_weight)",
           source="https://github.com/mosaicml/llm-foundry/pull/372"),
        of("eps_added_to_scaled_squares", f"root = ({SQUARES} + eps).sqrt() =>"
           " largest = wide_x.abs().amax(-1, keepdim=True) if x.shape[-1] else 1\n"
           "    root = ((wide_x / largest).square().mean(-1, keepdim=True) + eps).sqrt() * largest", right_on=one_row,
           source="https://github.com/apple/coremltools/pull/2822"),
        of("root_in_bfloat16", "+ eps).sqrt() => + eps).sqrt().bfloat16().float()", dtype="bfloat16",
           right_on="rows_of_zeros", source="https://github.com/amd/IRON/pull/139"),
        # A float32 input needs no conversion, so it is not copied.
        of("input_overwritten", f"{NORMAL} (wide_x.detach().div_(root) * wide_weight)", says="was modified|changed",
           right_on="rows_of_zeros", source="https://github.com/GeeeekExplorer/nano-vllm/issues/170"),
        of("squares_in_half", "(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for => (tensor for",
           dtype="float16", right_on="rows_of_zeros"),
        of("root_of_all_rows", OVER_ALL, right_on=one_row),
        of("weight_of_the_next_column", NEXT_COLUMN, right_on=one_row),
        of.gradient("product_left_out", NO_PRODUCT, right_on=without_cotangent),
        of("product_left_out", NO_PRODUCT, check=gradcheck, says="gradcheck: Jacobian mismatch", dtype="float64"),
        of.gradient("weight_left_out", f"{NORMAL} (wide_x / root + (wide_x / root).detach() * (wide_weight - 1))",
                    right_on=one_row, source="https://github.com/karpathy/llm.c/pull/763"),
        of.gradient("no_gradient", f"{NORMAL} ((wide_x / root).detach() * wide_weight + 0 * wide_x)",
                    right_on=without_cotangent, source="https://github.com/huggingface/candle/issues/2168"),
        of.unchecked("unchecked"),
        of.law(properties.a_sign_goes_through, f"{NORMAL} (wide_x.abs() / root * wide_weight)",
               right_on="rows_of_zeros"),
        of.law(properties.scaling_a_row_scales_the_deviation_alone, TYPED_IN, right_on=one_row),
        of.law(properties.columns_may_change_places, NEXT_COLUMN, right_on=without_cotangent),
        of.law(properties.normalized_rows_have_at_most_unit_mean_square, f"{SQUARES} =>"
               " (wide_x * wide_x)[..., : max(x.shape[-1] - 1, 1)].mean(-1, keepdim=True)", right_on="cols_1"),
        of.law(properties.gradient_of_weight_weighs_the_normalized_rows, *FIRST_ROW, right_on=one_row),
        of.law(properties.a_row_does_not_see_the_others, OVER_ALL, right_on=one_row),
        of.law(properties.gradients_of_two_batches_add_up, *FIRST_ROW, right_on=one_row),
    )


KERNELS = "layer_norm/triton_kernel.py:"
SUM = f"{KERNELS} grad_weight += grad * normal =>"
LAST = "where not CENTRED, and deviations.\"\"\""
PIECES = f"{KERNELS} cols if LOOPED else 1, =>"


def _triton_faults() -> tuple[Fault, ...]:
    of, strided = Edits("rms_norm", "triton"), named(properties, "all_sliced_columns")
    whole_block, weight = properties.rows(16, cols=1024), {"says": "gradient of weight", "right_on": without_cotangent}
    return (
        of("eps_outside_the_root", f"{KERNELS} rstd = tl.rsqrt(squares / num + tl.full((), eps, COMPUTE)) =>"
           " rstd = 1 / (tl.sqrt(squares / num) + tl.full((), eps, COMPUTE))",
           source="https://github.com/tile-ai/tilelang/pull/1243"),
        of("rstd_in_half", f"{KERNELS} eps, COMPUTE))\n => eps, COMPUTE)).to(tl.float16).to(COMPUTE)\n",
           right_on="rows_of_zeros"),
        of("last_load_not_masked", f"{KERNELS} held * held, 0.0) => held * held, 1.0)", right_on=whole_block),
        of("columns_past_a_block", f"{PIECES} BLOCK_COLS if LOOPED else 1,", right_on=one_row),
        of("columns_past_16_bits", f"{PIECES} cols % 65536 if LOOPED else 1,", right_on=one_row,
           examples=named(properties, "one_past_65536_columns")),
        of("offsets_in_32_bits", OFFSETS_OF_ROWS, examples=far_apart(properties.rows(9, cols=5)), right_on=one_row),
        of("column_stride_dropped", f"{KERNELS} x_inner_stride, x_column_stride, POLICY => x_inner_stride, 1, POLICY",
           examples=strided, right_on=one_row,
           source="https://github.com/ModelTC/LightLLM/issues/1467"),
        of.gradient("grad_output_contiguous_assumed", f"{KERNELS} inner, *grad_rows[1:], =>"
                    " inner, inner * cols, cols, 1,",
                    examples=strided, right_on=one_row, source="https://github.com/unslothai/unsloth/pull/10617"),
        # The last row is read again instead of missing rows.
        of.gradient("rows_past_the_end_repeated", f"{KERNELS} {LAST} => {LAST}\n"
                    "    rows = tl.minimum(rows, num_rows - 1)", right_on=whole_block),
        of.gradient("product_over_the_block", f"{KERNELS} tl.sum(grad_normal * normal, axis=1) / num =>"
                    " tl.sum(grad_normal * normal, axis=1) / BLOCK_COLS", right_on=one_row),
        of.gradient("partials_in_bfloat16", f"{KERNELS} if parameters and not direct else 0, cols)) =>"
                    " if parameters and not direct else 0, cols)).bfloat16()",
                    right_on=without_cotangent),
        of.gradient("cotangent_overwritten_by_gradient", f"{SUM} grad_weight += grad_x * normal", **weight,
                    source="https://github.com/unslothai/unsloth/pull/4550"),
        of.gradient("weight_summed_in_bfloat16", f"{SUM} grad_weight ="
                    " (grad_weight + grad * normal).to(tl.bfloat16).to(COMPUTE)", dtype="bfloat16", **weight,
                    source="https://github.com/linkedin/Liger-Kernel/pull/950"),
    )


TAIL = (
    "norm_rows.cuh: numbers[j] *= numbers[j]; =>"
    " numbers[j] *= cols <= 4 || last + first + k * step + j < cols / 4 * 4 ? numbers[j] : C(0);"
)
UNFENCED = (
    "staged.cuh:         fence_proxy_async();\n#endif\n        __syncthreads(); =>         fence_proxy_async();\n#endif"
)
ROOT_IN_CUDA = "norm_rows.cuh: rsqrt(mean_square + C(eps)) =>"


def _cuda_faults() -> tuple[Fault, ...]:
    of, one = Edits("rms_norm", "cuda"), {"right_on": one_row}
    return (
        of("eps_outside_the_root", f"{ROOT_IN_CUDA} (C(1) / (sqrt(mean_square) + C(eps)))"),
        of.stopped("barrier_missing", cuda_on_cpu.Race, BARRIER),
        of("first_warp_only", FIRST_WARP),
        of("tail_of_vectors_dropped", TAIL, **one),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, ROW_IN_32_BITS,
                   examples=far_apart(properties.rows(9, cols=5)), **one),
        of.stopped("grad_output_contiguous_assumed", cuda_on_cpu.OutOfBounds,
                   "norm_rows.py: strides = (*grads[1:], => strides = (inner * cols, cols, 1,", check=backward_agrees,
                   examples=named(properties, "all_sliced_columns"), **one),
        of.gradient("mean_left_to_a_sum", "norm_rows.cuh: means.second *= reciprocal; =>", right_on=without_cotangent),
        of.stopped("stage_filled_while_it_is_read", cuda_on_cpu.Race, UNFENCED, check=backward_agrees, **one),
        of.gradient("last_stage_alone_summed", "norm_rows.cuh: of_parameters[0][k][j] += =>"
                    " of_parameters[0][k][j] =", says="gradient of weight", right_on=without_cotangent),
        of.gradient("weight_never_written", "norm_rows.py: block, partial, grad_weight, => block, partial,"
                    " grad_output.new_empty(cols),", source="https://github.com/paiml/trueno/pull/178"),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
