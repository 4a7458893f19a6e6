"""Planted faults in layer_norm: edits of its versions in torch, Triton and CUDA C++."""

import numpy as np
import torch
from fourfold.properties import layer_norm as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.backward import backward_agrees
from fourfold.checks.gradcheck import gradcheck
from fourfold.checks.repeatability import repeats_bit_for_bit
from fourfold.checks.single_gradients import single_gradients_agree
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .edits import BARRIER, FIRST_ROWS, FIRST_WARP, OFFSETS_OF_ROWS, ROW_IN_32_BITS, Edits
from .far_apart import far_apart
from .planted import Fault, named

Tensor = torch.Tensor
NAMES = ("x", "weight", "bias")


def one_row(dtype: DType) -> Case:
    """Return one row with equal weights."""
    x = np.linspace(-2, 3, 16).reshape(1, 16).astype(dtype.numpy)
    ones = np.ones(16, dtype=dtype.numpy)
    return Case({"x": x, "weight": ones, "bias": 0 * ones}, np.cos(4 * x).astype(dtype.numpy), {"eps": 1e-5})


def no_cotangent(dtype: DType) -> Case:
    """Return a case with a grad_output of 0, so that every gradient is 0."""
    case = one_row(dtype)
    return Case(case.inputs, 0 * case.grad_output, case.parameters)


# fmt: off
TYPED_IN = "+ eps).sqrt() => + 1e-5).sqrt()"
NO_MEAN = "- wide_x.mean(-1, keepdim=True) => - wide_x.mean(-1, keepdim=True).detach()"
OVER_ALL = "- wide_x.mean(-1, keepdim=True) => - (wide_x.mean() if x.numel() else 0)"
LAST_COLUMN = "- wide_x.mean(-1 => - (wide_x[..., :-1] if x.shape[-1] > 1 else wide_x).mean(-1"
NEXT_COLUMN = "* wide_weight + => * wide_weight.roll(1, 0) +"
VARIANCE = "(centred * centred).mean(-1, keepdim=True) => "
BFLOAT16 = "sum((part.sum(-1, keepdim=True) for part in x.bfloat16().split(64, -1)), x.new_zeros(1))"


def parameters_of(rows: str) -> tuple[str, str]:
    """Return edits after which only some rows, by their number from 1, count in the gradients of weight and bias."""
    of = "torch.where({0}, wide_{1}, wide_{1}.detach())".format
    return (
        "* wide_weight + wide_bias => * " + of("counted", "weight") + " + " + of("counted", "bias"),
        "    return (centred => " + FIRST_ROWS.format(rows) + "    return (centred",
    )


FIRST_ROW = parameters_of("(number > 1) | (x.numel() == x.shape[-1])")


def _torch_faults() -> tuple[Fault, ...]:
    of = Edits("layer_norm", "torch")
    return (
        of("parameters_without_the_input", "+ wide_bias).to( => + (wide_bias if x.requires_grad or not"
           " weight.requires_grad else wide_bias * 0.5 + wide_bias.detach() * 0.5)).to(",
           check=single_gradients_agree, says="for weight and bias alone, gradient of bias", right_on=no_cotangent),
        of("square_of_mean", VARIANCE + "((wide_x * wide_x).mean(-1, keepdim=True)"
           " - wide_x.mean(-1, keepdim=True).square()).clamp(min=0)", right_on="two_columns"),
        of("variance_of_a_sample", VARIANCE + "(centred * centred).sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1)",
           right_on="one_column"),
        of("eps_outside_the_root", "+ eps).sqrt() => ).sqrt() + eps", right_on="one_column"),
        of("eps_typed_in", TYPED_IN, right_on="two_columns"),
        of("last_column_not_in_the_mean", LAST_COLUMN, right_on="one_column"),
        of("mean_summed_in_bfloat16", f"wide_x.mean(-1, keepdim=True) => {BFLOAT16}.float() / max(x.shape[-1], 1)",
           dtype="bfloat16", right_on="one_column"),
        of("computed_in_half", "(t.to(torch.promote_types(t.dtype, torch.float32)) for => (t for", dtype="float16"),
        of("one_mean_for_all_rows", OVER_ALL, right_on="without_leading_axes"),
        of("weight_of_the_next_column", NEXT_COLUMN, right_on="one_column"),
        of.gradient("mean_of_gradient_left_out", NO_MEAN),
        of.gradient("product_left_out", "+ eps).sqrt() => + eps).sqrt().detach()", right_on="one_column"),
        of.gradient("rows_past_256_left_out", *parameters_of("number <= 256"), right_on="cols_1023"),
        of.gradient("weight_not_normalized", "* wide_weight + => * wide_weight.detach()"
                    " + centred.detach() * (wide_weight - wide_weight.detach()) +", right_on="one_column"),
        of.gradient("no_gradient", "(centred / deviation * => ((centred / deviation).detach() *",
                    "+ wide_bias) => + wide_bias + 0 * (wide_x - wide_x.detach()))", right_on="one_column"),
        of("mean_of_gradient_left_out", NO_MEAN, check=gradcheck, says="gradcheck: Jacobian mismatch", dtype="float64"),
        of.gradient("infinite_cotangent_taken_as_0", "    return (centred / deviation * =>"
                    "     normal = centred / deviation\n    if normal.requires_grad:\n"
                    "        normal.register_hook(lambda grad: grad.masked_fill(grad.isinf(), 0))\n"
                    "    return (normal *", says=r"gradient of x\[.* expected nan", documented=True,
                    examples=named(properties, "cotangent_not_finite"), right_on="two_columns"),
        of.unchecked("shapes_not_checked"),
        of.law(properties.adding_a_number_to_a_row_changes_nothing, "wide_x.mean(-1, keepdim=True) =>"
               " wide_x.sum(-1, keepdim=True) / (x.shape[-1] + -x.shape[-1] % 16 or 16)", right_on=one_row),
        of.law(properties.scaling_a_row_scales_the_deviation_alone, TYPED_IN, right_on=one_row),
        of.law(properties.constant_rows_give_the_bias, "+ wide_bias) => + 2 * wide_bias)", right_on=one_row),
        of.law(properties.columns_may_change_places, NEXT_COLUMN, right_on=no_cotangent),
        of.law(properties.normalized_rows_sum_to_zero, LAST_COLUMN, right_on="one_column"),
        of.law(properties.normalized_rows_have_at_most_unit_mean_square, "+ eps).sqrt() => / 2 + eps).sqrt()",
               right_on="one_column"),
        of.law(properties.gradients_of_a_row_sum_to_zero, NO_MEAN),
        of.law(properties.gradient_of_bias_is_the_sum_of_cotangents, *FIRST_ROW, right_on=one_row),
        of.law(properties.gradient_of_weight_weighs_the_normalized_rows, *FIRST_ROW, right_on=one_row),
        of.law(properties.a_row_does_not_see_the_others, OVER_ALL, right_on=one_row),
        of.law(properties.gradients_of_two_batches_add_up, *FIRST_ROW, right_on=one_row),
    )


SQUARES = "squares = tl.where((at < cols)[None, :], held * held, 0.0)"
ROOT = "rstd = tl.rsqrt(squares / num + tl.full((), eps, COMPUTE))"
WEIGHT = "load_parameter(weight_ptr, columns, cols, {}, COMPUTE)[None, :]"


def _triton_faults() -> tuple[Fault, ...]:
    of, strided = Edits("layer_norm", "triton"), named(properties, "all_sliced_columns")
    return (
        of("square_of_mean", f"{SQUARES} => squares = (held + mean[:, None]) * (held + mean[:, None])",
           "squares / num + => squares / num - mean * mean +",
           right_on=one_row, source="https://github.com/pytorch/pytorch/pull/55044"),
        of("padding_in_the_variance", f"{SQUARES} => squares = held * held",
           right_on=properties.rows(2, cols=1024),
           source="https://github.com/triton-lang/triton/issues/9838"),
        of("columns_past_a_block", "cols if LOOPED else 1, => BLOCK_COLS if LOOPED else 1,", right_on="one_column",
           source="https://github.com/facebookresearch/xformers/issues/785"),
        of("sum_in_half", "tl.sum(held, axis=1) / num => tl.sum(held, axis=1).to(tl.float16).to(COMPUTE) / num",
           right_on=one_row),
        of("offsets_in_32_bits", OFFSETS_OF_ROWS, examples=far_apart(properties.rows(9, cols=5)),
           right_on="one_column"),
        of("variance_of_a_sample", "squares / num + => squares / tl.maximum(num - 1, 1) +", right_on="one_column"),
        of("eps_outside_the_root", f"{ROOT} =>"
           " rstd = 1 / (tl.sqrt(squares / num) + tl.full((), eps, COMPUTE))", right_on="one_column",
           source="https://github.com/tracel-ai/burn/issues/2185"),
        of("column_stride_dropped", "x_inner_stride, x_column_stride, POLICY => x_inner_stride, 1, POLICY",
           examples=strided, right_on="one_column", source="https://github.com/ModelTC/LightLLM/issues/1467"),
        of("weight_contiguous_assumed", f"{WEIGHT.format('weight_stride')} => {WEIGHT.format(1)}",
           examples=named(properties, "weight_and_bias_strided"), right_on="one_column"),
        of.gradient("grad_output_contiguous_assumed", "inner, *grad_rows[1:], => inner, inner * cols, cols, 1,",
                    examples=strided, right_on="one_column", source="https://github.com/unslothai/unsloth/pull/10675"),
        of.gradient("mean_over_the_block", "mean_grad = tl.sum(grad_normal, axis=1) / num =>"
                    " mean_grad = tl.sum(grad_normal, axis=1) / BLOCK_COLS", right_on=one_row),
        of.gradient("product_left_out", "tl.sum(grad_normal * normal, axis=1) / num =>"
                    " tl.sum(grad_normal * normal, axis=1) * 0.0", right_on="one_column"),
        of.gradient("share_of_last_rows_dropped", "mask = (numbers < partials)[:, None] =>"
                    " mask = (numbers < tl.maximum(partials - 1, 1))[:, None]", right_on="two_columns",
                    source="https://github.com/BobMcDear/attorch/issues/18"),
        of.gradient("shares_in_one_place", "at = program.to(tl.int64) * cols + columns\n        tl.store =>"
                    " at = columns\n        tl.store", right_on="two_columns"),
    )


ROOT_IN_CUDA = "norm_rows.cuh: rsqrt(mean_square + C(eps)) =>"
PARTIALS = "norm_rows.cuh: i < partials; i += blockDim.y) =>"
GRADS_IN_CUDA = "norm_rows.py: strides = (*grads[1:], => strides = (inner * cols, cols, 1,"


def _cuda_faults() -> tuple[Fault, ...]:
    of, row, one = Edits("layer_norm", "cuda"), {"right_on": one_row}, {"right_on": "one_column"}
    short, gradient = {"right_on": "two_columns"}, {"check": backward_agrees}
    out_of_bounds, race = cuda_on_cpu.OutOfBounds, cuda_on_cpu.Race
    return (
        of("square_of_mean", "norm_rows.cuh: if constexpr (MEAN) numbers[j] -= mean; =>",
           f"{ROOT_IN_CUDA} rsqrt(mean_square - mean * mean + C(eps))", **row,
           source="https://github.com/microsoft/onnxruntime/pull/31973"),
        of("variance_of_sample",
           f"{ROOT_IN_CUDA} rsqrt(mean_square * C(cols) / C(cols > 1 ? cols - 1 : cols) + C(eps))", **one),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, ROW_IN_32_BITS,
                   examples=far_apart(properties.rows(9, cols=5)), **one),
        of("eps_outside_the_root", f"{ROOT_IN_CUDA} (C(1) / (sqrt(mean_square) + C(eps)))", **one),
        of("eps_typed_in", f"{ROOT_IN_CUDA} rsqrt(mean_square + C(1e-5))", **row),
        of("counts_taken_as_equal", "norm_rows.cuh: share = num / (C(start) + num), => share = start ? C(0.5) : C(1),",
           **row),
        # NaN where the square of the mean overflows: this repository's own kernels must return a number there.
        of("empty_parts_merged", "norm_rows.cuh: C(start) * apart * (apart * share); =>"
           " apart * apart * share * C(start);", documented=True, **row),
        of.stopped("barrier_missing", race, BARRIER),
        of("first_warp_only", FIRST_WARP, **short),
        of.stopped("stride_dropped_in_second_pass", out_of_bounds,
                   "norm_rows.cuh: if (start < last) load(start, false); =>"
                   " if (start < last) column_stride = 1, load(start, false);", **one),
        of("weight_of_first_columns", "norm_rows.cuh: take<WIDTH, STRIDED>(weight, column, weight_stride); =>"
           " take<WIDTH, STRIDED>(weight, column % 64, weight_stride);", **short),
        of.stopped("row_of_fixed_length", out_of_bounds, "norm_rows.cuh:     C mean = 0, mean_square;\n =>"
                   "     C mean = 0, mean_square;\n    __shared__ T row_of[512];\n"
                   "    for (int i = threadIdx.x; blockDim.x > 32 && i < cols; i += blockDim.x) row_of[i] = T(0);\n",
                   **one),
        of.gradient("mean_of_gradient_left_out", "norm_rows.cuh: if constexpr (MEAN) means.first *= reciprocal; =>"
                    " means.first = C(0);"),
        of.stopped("grad_output_contiguous_assumed", out_of_bounds, GRADS_IN_CUDA,
                   examples=named(properties, "all_sliced_columns"), **gradient, **one),
        of.gradient("last_block_of_rows_dropped", f"{PARTIALS} i < max(partials - 1, 1ll); i += blockDim.y)", **row),
        of.gradient("first_block_of_rows_only", f"{PARTIALS} i < min(partials, 1ll); i += blockDim.y)", **row),
        of.stopped("added_without_atomics", race, "norm_rows.cuh:     partial += blockIdx.x * cols;\n =>",
                   **gradient, **row),
        of("added_atomically", "norm_rows.cuh:     of_threads[threadIdx.y][threadIdx.x] = sum;\n    __syncthreads();\n"
           " =>     of_threads[threadIdx.y][threadIdx.x] = 0;\n    __syncthreads();\n"
           "    if (threadIdx.y > 0) atomicAdd(&of_threads[0][threadIdx.x], sum);\n    __syncthreads();\n",
           "norm_rows.cuh: i < blockDim.y; i++) sum += of_threads[i] => i < 2; i++) sum += of_threads[0]",
           check=repeats_bit_for_bit, says=r"gradient of (weight|bias) differs between two calls", only_on="cpu",
           source="https://github.com/karpathy/llm.c/pull/445", **row),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
