"""Planted faults in add_rms_norm: edits of its versions in torch, Triton and CUDA C++."""

import numpy as np
from fourfold.properties import add_rms_norm as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.backward import backward_agrees
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.outputs import check_of_joined_outputs, outputs_fit
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .edits import BARRIER, OFFSETS_OF_ROWS, ROW_IN_32_BITS, Edits
from .far_apart import far_apart
from .planted import UNWRITTEN, Fault, named
from .planted_rms_norm import KERNELS, TAIL


def whole(dtype: DType) -> Case:
    """Return a row of small whole numbers, which any dtype can represent."""
    x = np.arange(16.0)[None].astype(dtype.numpy)
    inputs = {"x": x, "residual": x[:, ::-1] * 2, "weight": np.ones(16, dtype.numpy)}
    return Case(inputs, np.ones((1, 16), dtype.numpy), {"eps": 1e-6})


def residual_of_zeros(dtype: DType) -> Case:
    """Return a row to which nothing is added."""
    return with_residual(dtype, 0.0)


def the_same_twice(dtype: DType) -> Case:
    """Return a row that is added to itself."""
    return with_residual(dtype, 1.0)


def with_residual(dtype: DType, share: float) -> Case:
    x = np.linspace(1, 3, 16)[None].astype(dtype.numpy)
    inputs = {"x": x, "residual": (share * x).astype(dtype.numpy), "weight": np.ones(16, dtype.numpy)}
    return Case(inputs, np.cos(4 * x).astype(dtype.numpy), {"eps": 1e-6})


def without_cotangent(dtype: DType) -> Case:
    """Return a row whose gradients are 0."""
    case = residual_of_zeros(dtype)
    return Case(case.inputs, 0 * case.grad_output, case.parameters)


def without_both_cotangents(dtype: DType) -> Case:
    """Return a row whose gradients are 0, under cotangents of both outputs."""
    return properties.add_second_cotangent(without_cotangent(dtype), dtype)


# fmt: off
SUM = "    residual_out = x + residual\n =>     residual_out ="
NORM = "    return rms_norm(residual_out, weight, eps), =>    "
STORED = "weight, eps), residual_out => weight, eps),"
ROOT_OF_X = f"{NORM} return residual_out / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight,"
WITHOUT_RESIDUAL = f"{NORM} return rms_norm(x + residual.detach() + 0 * residual, weight, eps),"
THE_RESIDUAL = f"{STORED} residual.clone() + 0 * x"
WEIGHT_OF_X = (
    f"{NORM} part = rms_norm(residual_out, torch.ones_like(weight), eps) * x / residual_out\n"
    "    return rms_norm(residual_out, weight.detach(), eps) + part.detach() * (weight - weight.detach()),"
)


def _torch_faults() -> tuple[Fault, ...]:
    of, y, sums = Edits("add_rms_norm", "torch"), {"output": "y"}, {"output": "residual_out"}
    together = {"check": check_of_joined_outputs(backward_agrees), "right_on": without_both_cotangents}
    zeros = {"right_on": properties.examples["sums_are_zero"], **y}
    return (
        of("norm_before_the_sum", f"{NORM} return rms_norm(x, weight, eps),", right_on=residual_of_zeros, **y),
        of("root_before_the_sum", ROOT_OF_X, right_on=residual_of_zeros, **y),
        # The residual is another name of x, which is then normalized in place: see conch in docs/public_kernels.md.
        of("both_normalized", f"{STORED} rms_norm(residual_out, weight, eps)", **sums),
        of("x_added_to_itself", f"{SUM} x + x + 0 * residual\n", right_on=the_same_twice, **sums,
           source="https://github.com/NVIDIA/FasterTransformer/pull/466"),
        # The sum loses its last bits, as bfloat16 is the upper half of float32.
        of("sum_truncated", f"{SUM} ((x.detach().float() + residual.detach().float()).view(torch.int32) & -65536).view("
           "torch.float32).to(x.dtype) + 0 * x + 0 * residual\n", dtype="bfloat16", right_on=residual_of_zeros, **sums,
           source="https://github.com/ROCm/aiter/issues/5151"),
        of("residual_overwritten", f"{NORM} if 0 not in residual.stride():\n        residual.detach().copy_("
           "residual_out.detach())\n    return rms_norm(residual_out, weight, eps),",
           says="changed its input residual", **y),
        of("residual_out_is_the_residual", THE_RESIDUAL, **sums),
        of.gradient("cotangents_added_before_the_norm",
                    f"{NORM} y = rms_norm(residual_out, weight, eps)\n    return y,",
                    "y, residual_out\n => y, y - y.detach() + residual_out.detach()\n", **together,
                    source="https://github.com/Dao-AILab/quack/pull/53"),
        of.gradient("skip_left_out", f"{STORED} residual_out.detach() + 0 * residual_out",
                    right_on=without_cotangent, **sums, source="https://github.com/paiml/entrenar/issues/313"),
        of.gradient("skip_counted_twice", f"{STORED} 2 * residual_out - residual_out.detach()", **together),
        of.gradient("no_residual_without_its_output", WITHOUT_RESIDUAL, right_on=without_cotangent, **y,
                    source="https://github.com/Dao-AILab/quack/pull/52"),
        of("residual_passed_by_the_norm", WITHOUT_RESIDUAL, check=outputs_fit,
           says="gradients of x and of residual differ", right_on=without_both_cotangents),
        of.gradient("weight_of_x_alone", WEIGHT_OF_X, right_on=without_cotangent, **y),
        of.gradient("mean_left_out", f"{NORM} root = (residual_out.square().mean(-1, keepdim=True) + eps).sqrt()\n"
                    "    return residual_out / root.detach() * weight,", right_on=without_cotangent, **y),
        of.unchecked("unchecked", **y),
        of.law(properties.the_summands_may_change_places, ROOT_OF_X, **zeros),
        of.law(properties.a_sign_goes_through, f"{NORM} return rms_norm(residual_out, weight, eps).abs(),", **zeros),
        of.law(properties.y_is_the_norm_of_the_sum, f"{NORM} return residual_out"
               " / (residual_out.square().mean() + eps).sqrt() * weight,", right_on=residual_of_zeros, **y),
        of.law(properties.gradient_of_weight_weighs_the_normalized_rows, WEIGHT_OF_X, right_on=residual_of_zeros, **y),
        of.law(properties.the_summands_may_change_places, f"{SUM} x + residual - residual.detach() / 2\n",
               name="sums_law", right_on=the_same_twice, **sums),
        of.law(properties.nothing_is_added_to_nothing, THE_RESIDUAL, name="sums_law", **sums),
    )


STRIDES = f"{KERNELS} residual_outer_stride, residual_inner_stride, residual_column_stride, POLICY,\n        ) =>"
STORED_OUTPUT = "held * rstd[:, None], CENTRED, COMPUTE, WRITTEN,\n        )  # fmt: skip"
ROW_OF_X = "x_ptr, rows, at, num_rows, cols, inner, x_outer_stride, x_inner_stride, x_column_stride, AGAIN"


def _triton_faults() -> tuple[Fault, ...]:
    of, sums = Edits("add_rms_norm", "triton"), {"output": "residual_out"}
    y = {"output": "y", "right_on": residual_of_zeros}
    return (
        of("variance_of_x", f"{KERNELS} held * held, 0.0) => load_tile({ROW_OF_X}).to(COMPUTE) * load_tile("
           f"{ROW_OF_X}).to(COMPUTE), 0.0)", **y),
        of("row_stride_of_x", f"{STRIDES} x_outer_stride, x_inner_stride, residual_column_stride, POLICY,\n        )",
           examples=named(properties, "residual_lies_otherwise"), **y,
           source="https://github.com/NVIDIA/TensorRT-LLM/pull/14810"),
        of("columns_adjacent", f"{STRIDES} residual_outer_stride, residual_inner_stride, 1, POLICY,\n        )",
           examples=named(properties, "all_sliced_columns"), **y),
        of("residual_past_the_end", f"{KERNELS} held * held, 0.0) => held * held, 1.0)", **y),
        of("sum_in_float16", f"{KERNELS} residual.to(COMPUTE)).to(summed => residual.to(COMPUTE)).to(tl.float16).to("
           "summed", examples=named(properties, "residual_is_far_larger"), right_on=whole, **sums),
        of("normalized_is_stored_as_the_sum", f"{KERNELS} {STORED_OUTPUT} => {STORED_OUTPUT}\n"
           "        store_tile(summed_ptr, rows, columns, num_rows, cols, held * rstd[:, None], WRITTEN)", **sums),
        of("offsets_in_32_bits", OFFSETS_OF_ROWS, examples=far_apart(properties.rows(9, cols=5)), **y,
           source="https://github.com/vllm-project/vllm/issues/43390"),
    )


OF_X = (
    "norm_rows.cuh: numbers[j] *= numbers[j]; => const long long at = last + first + k * step + j;\n"
    "                const C of_x = at < cols ? C(x[at * column_stride]) : C(0);\n"
    "                numbers[j] = of_x * of_x;"
)


def _cuda_faults() -> tuple[Fault, ...]:
    of, y, sums = Edits("add_rms_norm", "cuda"), {"output": "y"}, {"output": "residual_out"}
    zeros = {"right_on": residual_of_zeros}
    return (
        of("variance_of_x", OF_X, **y, **zeros),
        of("row_stride_of_x", "norm_rows.cuh: inner, residual_outer_stride, residual_inner_stride) =>"
           " inner, outer_stride, inner_stride)",
           examples=named(properties, "residual_lies_otherwise"), **y, **zeros),
        of("sum_never_stored_past_a_block", "norm_rows.cuh: if (store_sums) data[k] =>"
           " if (store_sums && at(k) < 64) data[k]", check=memory_is_respected, says=UNWRITTEN, **sums, **zeros),
        of.stopped("barrier_missing", cuda_on_cpu.Race, BARRIER, **y),
        of("tail_of_vectors_dropped", TAIL, right_on="many_rows_of_whole_vectors", **y),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, ROW_IN_32_BITS,
                   examples=far_apart(properties.rows(9, cols=5)), **y, **zeros),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
