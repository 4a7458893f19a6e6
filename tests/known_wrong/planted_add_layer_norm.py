"""Planted faults in add_layer_norm: edits of its versions in torch, Triton and CUDA C++."""

from fourfold.properties import add_layer_norm as properties
from fourfold.properties.add_layer_norm import rows
from fourfold.properties.add_rms_norm import nothing_is_added_to_nothing

from fourfold.checks.backward import backward_agrees
from fourfold.checks.outputs import check_of_joined_outputs

from .edits import FIRST_WARP, Edits
from .planted import Fault
from .planted_rms_norm import KERNELS

# fmt: off
GITHUB = "https://github.com"
SUM, Y, H = "h = x + residual\n    return layer_norm(h => h = x +", {"output": "y"}, {"output": "h"}
SHORT = {"right_on": rows(2, cols=24)}
OF_BOTH, BACKWARD = {"check": check_of_joined_outputs(backward_agrees)}, f"{KERNELS} inner, (grad_rows, =>"


def _torch_faults() -> tuple[Fault, ...]:
    of = Edits("add_layer_norm", "torch")
    return (
        of("x_added_to_itself", f"{SUM} x + 0 * residual\n    return layer_norm(h", **H,
           source=f"{GITHUB}/NVIDIA/FasterTransformer/pull/466"),
        # As bfloat16 is the upper half of float32, the sum loses its last bits.
        of("sum_truncated", f"{SUM} residual\n    low = h - (h.detach().float().view(torch.int32) & -65536).view("
           "torch.float32)\n    h = (h - low.detach()).to(x.dtype)\n    return layer_norm(h", **H,
           source=f"{GITHUB}/ROCm/aiter/issues/5151"),
        of.law(properties.the_summands_may_change_places, f"{SUM} residual / 2\n    return layer_norm(h",
               name="half_of_the_residual", **Y),
        of.law(properties.y_is_the_norm_of_the_sum, "layer_norm(h, weight, bias, eps), => layer_norm(residual + 0 * x,"
               " weight, bias, eps),", name="norm_of_the_residual", **Y),
        of.law(nothing_is_added_to_nothing, f"{SUM} residual + 0.125\n    return layer_norm(h",
               name="something_added", **H),
    )


def _triton_faults() -> tuple[Fault, ...]:
    of = Edits("add_layer_norm", "triton")
    return (
        of("norm_before_the_sum", f"{KERNELS} x = (x.to(COMPUTE) + => summed = (x.to(COMPUTE) +",
           f"{KERNELS} store_tile(summed_ptr, rows, columns, num_rows, cols, x, \"\") =>"
           " store_tile(summed_ptr, rows, columns, num_rows, cols, summed, \"\")", **Y),
        of("bias_left_out", f"{KERNELS} output += load_parameter => output += 0 * load_parameter", **Y),
        of.gradient("gradients_of_1024_columns_are_0", f"{BACKWARD} if cols == 1024:\n"
                    "        grad_output = torch.zeros_like(grad_output)\n    inner, (grad_rows,", **Y, **SHORT,
                    source=f"{GITHUB}/PaddlePaddle/Paddle/pull/74149"),
        of.gradient("rows_of_the_first_axis_alone",
                    f"{BACKWARD} num_rows = min(num_rows, len(x))\n    inner, (grad_rows,",
                    source=f"{GITHUB}/flagos-ai/FlagGems/issues/5392", **Y, **SHORT),
        of.gradient("cotangent_of_h_left_out", f'{KERNELS} "ADDED": added is not None => "ADDED": False', **OF_BOTH),
    )


def _cuda_faults() -> tuple[Fault, ...]:
    of = Edits("add_layer_norm", "cuda")
    return (
        of("x_added_to_itself", "norm_rows.cuh: T(numbers[j] + others[j]) => T(numbers[j] + numbers[j])", **H,
           source=f"{GITHUB}/NVIDIA/FasterTransformer/pull/466"),
        of("first_warp_alone", FIRST_WARP, **Y, **SHORT),
        of.gradient("gradient_added_to_itself", "norm_rows.cuh: of_x += to_add[j]; =>2 of_x += of_x;", **OF_BOTH),
        of.gradient("mean_subtracted_twice", "norm_rows.cuh: of_normal -= means.first; =>"
                    " of_normal -= C(2) * means.first;", **Y,
                    source=f"{GITHUB}/tenstorrent/tt-metal/pull/53215"),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
