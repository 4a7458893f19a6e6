"""Planted faults in softmax: edits of its versions in torch, Triton and CUDA C++."""

import numpy as np
from fourfold.properties import softmax

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.backward import backward_agrees
from fourfold.checks.memory import memory_is_respected
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .edits import OFFSETS_OF_ROWS, ROW_IN_32_BITS, Edits
from .far_apart import far_apart
from .planted import UNWRITTEN, Fault, named


def cotangent_of_zeros(dtype: DType) -> Case:
    """Return a case with a grad_output of 0, whose gradient is 0 with or without the sum."""
    return Case({"x": np.eye(3).astype(dtype.numpy)}, np.zeros((3, 3), dtype=dtype.numpy))


# fmt: off
RIGHT = "torch.softmax(in_compute_dtype(x), dim=-1) =>"
SUM, LARGEST = "terms.sum(-1, keepdim=True)", "(wide.detach().amax(-1, keepdim=True) if x.shape[-1] else 0)"


def steps(total: str = SUM, largest: str = LARGEST, wide: str = "in_compute_dtype(x)") -> str:
    """Return an edit that writes out the steps of softmax."""
    return (
        f"    return {RIGHT}     wide = {wide}\n    terms = (wide - {largest}).exp()\n"
        f"    total = {total}\n    return (terms / total)"
    )


FORGOTTEN = steps("(terms[..., :-1] if x.shape[-1] > 1 else terms).sum(-1, keepdim=True)")
PADDED = (
    f"{RIGHT} torch.softmax(torch.nn.functional.pad(in_compute_dtype(x), (0, -x.shape[-1] % 16)), dim=-1)"
    "[..., : x.shape[-1]]"
)
OF_ALL, NO_SUM = steps(largest="(wide.detach().max() if x.numel() else 0)"), steps(f"{SUM}.detach()")


def _torch_faults() -> tuple[Fault, ...]:
    of, one, two = Edits("softmax", "torch"), {"right_on": "cols_1"}, {"right_on": "two_columns"}
    return (
        of("no_maximum", steps(largest="0"), **two),
        of("last_column_forgotten", FORGOTTEN, **one),
        of.law(softmax.rows_sum_to_one, FORGOTTEN, name="last_column_forgotten", **one),
        of.law(softmax.entries_lie_between_zero_and_one, FORGOTTEN, name="last_column_forgotten", **one),
        of.law(softmax.columns_may_change_places, FORGOTTEN, name="last_column_forgotten", **one),
        of("tail_of_16_forgotten", steps("terms[..., : x.shape[-1] // 16 * 16 or None].sum(-1, keepdim=True)"),
           right_on="long_row"),
        of("padded_with_zeros", PADDED, right_on="long_row"),
        of.law(softmax.adding_a_number_to_a_row_changes_nothing, PADDED, name="padded_with_zeros", right_on="long_row"),
        of.law(softmax.masked_columns_add_nothing, PADDED, name="padded_with_zeros"),
        of("summed_in_bfloat16", steps("sum((part.sum(-1, keepdim=True) for part in terms.bfloat16().split(64, -1)),"
           " terms.new_zeros(1, dtype=torch.bfloat16))"), dtype="bfloat16", **two),
        of("computed_in_half", steps(wide="x"), dtype="bfloat16", **one),
        of("online_without_rescaling", steps("sum((wide[..., at : at + 4096] - wide[..., : at + 4096].amax(-1, True))"
           ".exp().nan_to_num(0).sum(-1, True) for at in range(0, x.shape[-1], 4096))"), **two),
        of("nan_dropped", "in_compute_dtype(x) => torch.where(x.isnan(), -torch.inf, in_compute_dtype(x))", **two),
        of("masked_rows_zero", f"{RIGHT} torch.where((x == -torch.inf).all(-1, keepdim=True), 0, x.softmax(-1))",
           **two),
        of("largest_of_all_rows", OF_ALL, **two),
        of.law(softmax.a_row_does_not_see_the_others, OF_ALL, name="largest_of_all_rows", **two),
        of("first_axis", "dim=-1 => dim=0", right_on="without_leading_axes"),
        of.gradient("sum_left_out", NO_SUM, right_on=cotangent_of_zeros),
        of.law(softmax.gradients_of_a_row_sum_to_zero, NO_SUM, name="sum_left_out"),
        of.law(softmax.a_constant_cotangent_gives_no_gradient, NO_SUM, name="sum_left_out"),
        of.gradient("no_gradient", f"{RIGHT} (x.softmax(-1).detach() + 0 * x.softmax(-1))", **one),
        of.gradient("mean_for_sum", steps(f"{SUM}.detach() + ({SUM} - {SUM}.detach()) / x.shape[-1]"), **one),
        of.unchecked("scalars_accepted"),
    )


WHOLE_BLOCK = softmax.rows(2, cols=1024)
MAXIMUM, TOTAL = "tl.max(x, axis=1)", "1.0 / tl.sum(terms, axis=1)"
RESCALED = "total = total * exponential(largest - reference) + tl.sum( =>"
STORE = "tl.store(output_ptr + output_at, output.to(output_ptr.dtype.element_ty)"


def _triton_faults() -> tuple[Fault, ...]:
    of, strided, two = Edits("softmax", "triton"), named(softmax, "all_sliced_columns"), {"right_on": "two_columns"}
    return (
        of("other_is_zero", 'other=float("-inf")).to(COMPUTE)\n    # => other=0.0).to(COMPUTE)\n    #',
           right_on=WHOLE_BLOCK),
        of("columns_past_a_block", f"{TOTAL} => 1.0 / tl.sum(tl.where((columns < 1024)[None, :], terms, 0.0), axis=1)",
           source="https://github.com/facebookresearch/xformers/issues/785", **two),
        of("last_block_only", f"{RESCALED} total = tl.sum(", **two),
        of("no_maximum", f"exponential(x - {MAXIMUM}[:, None]) => exponential(x)", **two),
        of("maximum_from_a_finite_number", f"{MAXIMUM} => tl.maximum({MAXIMUM}, -5e4)",
           source="https://github.com/flashinfer-ai/flashinfer/pull/4401", **two),
        of("maximum_of_magnitudes", f"{MAXIMUM} => tl.max(tl.where(mask, tl.abs(x), 0.0), axis=1)",
           right_on="cols_1"),
        of("sum_not_rescaled", f"{RESCALED} total = total + tl.sum(", **two),
        of("maximum_not_kept", "largest = new => largest = new if tile == 0 else largest",
           source="https://github.com/KarhouTam/cuda-kernels/issues/1", **two),
        of("infinity_less_infinity", 'reference = tl.where(new == float("-inf"), 0.0, new) => reference = new',
           source="https://github.com/Dao-AILab/flash-attention/issues/1930",
           examples=named(softmax, "late_maximum"), **two),
        of("sum_in_half", f"{TOTAL} => {TOTAL}.to(tl.float16).to(COMPUTE)", right_on="equal_numbers"),
        of("contiguous_assumed", "[:, None] + (columns * x_column_stride)[None, :] => [:, None] + columns[None, :]",
           examples=strided, **two),
        of("offsets_in_32_bits", OFFSETS_OF_ROWS, examples=far_apart(softmax.rows(9, cols=5)),
           source="https://github.com/databricks/megablocks/pull/185", **two),
        of("rows_past_the_grid", "(cdiv(num_rows, by.block_rows),) => (min(cdiv(num_rows, by.block_rows), 4),)",
           check=memory_is_respected, says=UNWRITTEN, **two),
        of("store_unmasked", f"{STORE}, mask=mask) => {STORE})", check=memory_is_respected,
           says=r"wrote \d+ elements past the end", right_on=WHOLE_BLOCK),
        of.gradient("sum_of_last_block", "tl.sum(products + tl.sum( => tl.sum(0 * products + tl.sum(", **two),
        of.gradient("grad_output_strided_as_y", "(columns * grad_output_column_stride)[None, :] => columns[None, :]",
                    examples=strided, source="https://github.com/unslothai/unsloth/pull/10617", **two),
    )


MOST = "most = max(most, in_pairs(part[k], [](C a, C b) { return max(a, b); })); =>"
PRESENT, RESULT = "const bool present = lane < threads / 32; =>", "scale = C(1) / terms.sum, =>"
BARRIER = "        }}\n        __syncthreads();\n        const bool present =>         }}\n{}        const bool present"
KEPT = "    Vector<T, WIDTH> kept[KEEP];\n =>     Vector<T, WIDTH> kept[KEEP];\n"
LAST_SUM = "        sum = present ? sum_of_warps[lane] : C(0);\n => "


def _cuda_faults() -> tuple[Fault, ...]:
    of, one, two = Edits("softmax", "cuda"), {"right_on": "cols_1"}, {"right_on": "two_columns"}
    written, one_warp = {"check": memory_is_respected, "says": UNWRITTEN}, {"right_on": "two_columns"}
    out_of_bounds, race, divergent = cuda_on_cpu.OutOfBounds, cuda_on_cpu.Race, cuda_on_cpu.DivergentBarrier
    strided = named(softmax, "all_sliced_columns")
    return (
        of("no_maximum", "const C reference = taken_off(most); => const C reference = most = C(0);", **two),
        of("maximum_from_zero", "C largest = minus_infinity<C>(), sum = 0; => C largest = 0, sum = 0;", **two),
        of("maximum_of_magnitudes",
           f"{MOST} for (C x : part[k]) most = max(most, x > minus_infinity<C>() ? C(fabs(x)) : x);", **one),
        of("maximum_of_own_columns", "sum_of_lanes(sum * exponential(largest - taken_off(most)), lanes) =>"
           " sum_of_lanes(sum, lanes)", source="https://github.com/Infatoshi/cuda-course/issues/10", **one),
        of("first_warp_only", f"{PRESENT} const bool present = lane < 1;", **one_warp),
        of.stopped("barrier_missing", race, BARRIER.format(""),
                   source="https://github.com/JustVugg/colibri/pull/1098"),
        of.stopped("buffer_used_again", race, f"{LAST_SUM}        if (lane == 0) largest_of_warps[warp] = sum;\n"
                   "        __syncthreads();\n        sum = present ? largest_of_warps[lane] : C(0);\n",
                   source="https://github.com/ggml-org/llama.cpp/pull/26385"),
        of.stopped("unwritten_slots_read", cuda_on_cpu.UninitialisedShared, f"{PRESENT} const bool present = true;",
                   source="https://github.com/RussWong/CUDATutorial/issues/6"),
        of.stopped("shuffle_of_half_a_warp", cuda_on_cpu.DivergentWarp,
                   "rows.cuh: C other = __shfl_xor_sync(~0u, => C other = __shfl_xor_sync(0xffffu,"),
        of.stopped("idle_threads_return", cuda_on_cpu.Deadlock,
                   "        if (lane == 0) {\n            largest_of_warps =>"
                   "         if (lane) return;\n        {\n            largest_of_warps", right_on=WHOLE_BLOCK,
                   source="https://github.com/karpathy/llm.c/issues/776"),
        of.stopped("barrier_in_a_branch", race, BARRIER.format("        if (threadIdx.x < 32) __syncthreads();\n"),
                   source="https://github.com/1bit-MONSTER/1bit-MONSTER/issues/620"),
        of.stopped("barrier_in_a_loop", divergent, "                if (i >= count) to[k] = filled =>"
                   " if (i < count) __syncthreads();\n                if (i >= count) to[k] = filled",
                   right_on=softmax.rows(4, cols=1024)),
        of.stopped("row_of_fixed_length", out_of_bounds, f"{KEPT}    __shared__ T row_of[512];\n"
                   "    for (int i = thread; size > 32 && i < cols; i += size) row_of[i] = T(0);\n", **two),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, ROW_IN_32_BITS,
                   examples=far_apart(softmax.rows(9, cols=5)), **two),
        of("rows_past_the_grid", "-(-num_rows // together) * blocks =>"
           " min(-(-num_rows // together), 4) * blocks", **written, **two),
        of.stopped("contiguous_assumed", out_of_bounds, "{{first[i * column_stride]}} => {{first[i]}}",
                   examples=strided, **two),
        of("zero_where_nothing_is_left", "own_scale = => own_scale = largest == minus_infinity<C>() ? C(0) :", **two,
           source="https://github.com/pytorch/pytorch/pull/131060"),
        of("sum_in_half", "sum += sum_in_pairs(part[k]); =>"
           " sum = C(__half(float(sum + sum_in_pairs(part[k]))));",
           right_on="equal_numbers"),
        of("last_columns_dropped", "(SHIFTED ? i - threadIdx.x % 32 : i) >= count =>"
           " (SHIFTED ? i - threadIdx.x % 32 : i) >= (count > 32 ? count / 32 * 32 : count)", **written, **two),
        of("reciprocal_of_half", f"{RESULT} scale = C(__half(float(C(1) / terms.sum))),", **one),
        of.stopped("grad_output_contiguous_assumed", out_of_bounds,
                   "grad_outer_stride, grad_inner_stride, grad_column_stride);\n => inner * cols, cols, 1);\n",
                   check=backward_agrees, examples=strided, **two),
        of.gradient("sum_of_first_warp", "lane < threads / 32 ? of_warps[lane] => lane < 1 ? of_warps[lane]",
                    **one_warp),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
