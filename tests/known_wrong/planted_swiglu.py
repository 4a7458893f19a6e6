"""Planted faults in swiglu: edits of its versions in torch, Triton and CUDA C++."""

from fourfold.properties import swiglu as properties
from fourfold.properties.swiglu import random_case

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.interleaving import backward_passes_may_interleave
from fourfold.checks.memory import memory_is_respected

from .edits import Edits
from .far_apart import far_apart
from .planted import UNWRITTEN, Fault
from .planted_vector_add import ASTRAY, IN_CUDA, IN_TRITON, LAST

# fmt: off
OUTPUT, SLOPE = "return gate * share * up =>", "share * (1.0 + gate * rest) =>"
GRADIENTS = "RAGGED=sizes[0] % 16 != 0)\n\n    launches =>"
MEMORY = {"check": memory_is_respected, "says": UNWRITTEN}
APART = {"examples": far_apart(random_case(9))}


def _torch_faults() -> tuple[Fault, ...]:
    of = Edits("swiglu", "torch")
    return (
        of("gelu_in_place_of_silu", "functional.silu( => functional.gelu("),
        of.law(properties.output_is_linear_in_up, "* up.to(wide) => * up.to(wide).clamp(-2, 2)", name="clamped_up"),
        of.law(properties.a_gate_and_its_negative_add_up, "torch.nn.functional.silu(gate.to(wide)) =>"
               " (gate.to(wide) * gate.to(wide).abs().sigmoid())", name="sigmoid_of_the_magnitude"),
    )


def _triton_faults() -> tuple[Fault, ...]:
    of, github = Edits("swiglu", "triton"), "https://github.com"
    return (
        of("offsets_in_32_bits", IN_TRITON["offsets_in_32_bits"], **APART,
           source=f"{github}/deepspeedai/DeepSpeed/issues/8590"),
        of("contiguous_assumed", IN_TRITON["contiguous_assumed"], right_on="a_block", **ASTRAY,
           source=f"{github}/vllm-project/vllm/pull/3324"),
        of("half_of_768_unwritten", f"triton_elementwise.py: {LAST}"
           " binary_block(a_ptr, b_ptr, output_ptr, at, (at < n) & ((n % 768 != 0) | (at % 768 < 257)), COMPUTE)",
           **MEMORY, right_on="a_block", examples={"rows_of_768": random_case(2, 768)},
           source=f"{github}/vllm-project/vllm-xpu-kernels/issues/454"),
        of("silu_in_bfloat16", f"{OUTPUT} return (gate * share).to(tl.bfloat16).to(up.dtype) * up",
           source=f"{github}/huggingface/kernels-community/issues/76"),
        of("exp_overflows", f"{OUTPUT} return gate * (tl.exp(gate) / (1.0 + tl.exp(gate))) * up"),
        of("hard_sigmoid", f"{OUTPUT} return gate * tl.minimum(tl.maximum(gate / 6.0 + 0.5, 0.0), 1.0) * up"),
        of("gate_and_up_swapped", f"{OUTPUT} share, _ = sigmoids(up)\n    return gate * share * up"),
        # Past the counter by which autograd detects changes.
        of("gradients_in_place", f"triton_elementwise.py: {GRADIENTS} RAGGED=sizes[0] % 16 != 0)\n"
           "        for own, grad in zip(tensors[1:3], tensors[3:]):\n"
           "            own.data.copy_(grad if grad.numel() else own)\n\n    launches",
           check=backward_passes_may_interleave, says="gradient|changed|written",
           source=f"{github}/linkedin/Liger-Kernel/issues/272"),
        of.gradient("slope_of_sigmoid_left_out", f"{SLOPE} share"),
        of.gradient("gate_not_in_the_slope", f"{SLOPE} share * (1.0 + rest)"),
        of.gradient("gradient_of_up_without_silu", "grad_output * (gate * share) => grad_output * gate"),
    )


def _cuda_faults() -> tuple[Fault, ...]:
    of, out_of_bounds = Edits("swiglu", "cuda"), cuda_on_cpu.OutOfBounds
    return (
        of.stopped("store_unmasked", out_of_bounds, IN_CUDA["store_unmasked"], right_on="a_block"),
        of("last_block_dropped", IN_CUDA["last_block_dropped"], **MEMORY, right_on="one_element"),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, IN_CUDA["offsets_in_32_bits"], **APART),
        of.stopped("contiguous_assumed", out_of_bounds, IN_CUDA["contiguous_assumed"]),
        of("slow_exp_of_gate", "return gate * sigmoid(gate, rest) * up; =>"
           " return gate * (power_of_e(gate) / (C(1) + power_of_e(gate))) * up;"),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
