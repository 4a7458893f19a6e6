"""Planted faults in attention_with_lse: edits of attention's versions in torch, Triton and CUDA C++."""

from fourfold.properties import attention_with_lse as properties

from fourfold.checks.backward import backward_agrees
from fourfold.checks.outputs import check_of_joined_outputs

from .edits import Edits
from .planted import Fault

# fmt: off
GITHUB = "https://github.com"
LSE, OF_BOTH = {"output": "lse"}, {"check": check_of_joined_outputs(backward_agrees)}
RISING = properties.operation.outputs["lse"].examples["scores_that_rise"]
TORCH, TRITON, CUDA = (f"attention/{name}: " for name in ("torch_eager.py", "triton_kernel.py", "cuda_kernel.cu"))


def _torch_faults() -> tuple[Fault, ...]:
    of = Edits("attention_with_lse", "torch")
    sums = f"{TORCH}scores.logsumexp(-1) if => "
    return (
        of("logarithm_left_out", f"{sums}scores.exp().sum(-1) if", **LSE),
        of("rows_without_keys_are_0", f"{sums}scores.logsumexp(-1).masked_fill(hidden.all(-1), 0) if", **LSE,
           right_on=RISING),
        of.gradient("cotangent_of_lse_dropped", f"{sums}scores.logsumexp(-1).detach() + 0 * scores.sum(-1).nan_to_num("
                    "0, 0, 0) if", **LSE,
                    source=f"{GITHUB}/Dao-AILab/flash-attention/issues/1817"),
        of.law(properties.logarithms_of_parts_add_up, f"{sums}scores[..., -16:].logsumexp(-1) if",
               name="last_keys_alone", **LSE),
    )


def _triton_faults() -> tuple[Fault, ...]:
    of = Edits("attention_with_lse", "triton")
    stored = f"{TRITON}total_q + token, base + tl.log(sums), => total_q + token,"
    return (
        of("largest_not_added", f"{stored} tl.log(sums),", **LSE),
        of("in_base_2", f"{stored} (base + tl.log(sums)) * 1.4426950408889634,", **LSE,
           source=f"{GITHUB}/sgl-project/sglang/issues/40903"),
        of.gradient("cotangent_of_lse_added", f"{TRITON}delta -= tl.load => delta += tl.load", **OF_BOTH),
    )


def _cuda_faults() -> tuple[Fault, ...]:
    of = Edits("attention_with_lse", "cuda")
    return (
        of("largest_not_added", f"{CUDA}row] = base + log(total[i]); => row] = log(total[i]);", **LSE),
        of("by_token", f"{CUDA}lse[head * total_q + place.begin + place.first + warp * 16 + row] ="
           " => lse[(place.begin + place.first + warp * 16 + row) * heads + head] =", **LSE,
           right_on=RISING),
        of.gradient("cotangent_of_lse_dropped", f"{CUDA}grad_lse ? sum - grad_lse[at] : sum => sum", **OF_BOTH),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
