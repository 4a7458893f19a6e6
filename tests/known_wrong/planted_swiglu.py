"""Planted faults in swiglu: in small kernels of Triton and CUDA C++, and in torch."""

from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl
from fourfold.impls.swiglu.torch_eager import swiglu as definition
from fourfold.properties import swiglu as properties
from fourfold.properties.swiglu import random_case

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.signature import signature_of
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.forward import forward_agrees
from fourfold.checks.interleaving import backward_passes_may_interleave
from fourfold.checks.memory import memory_is_respected

from .far_apart import far_apart
from .planted import GRADIENT, OUTPUT, UNWRITTEN, Check, Fault, kernel_faults, law
from .planted_cuda import Planted
from .steps import Implementation, differentiable

check_swiglu = signature_of(definition).check
BLOCK = 256


@triton.jit
def swiglu_kernel(
    gate_ptr, up_ptr, output_ptr, n, gate_stride, up_stride, FAULT: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    # One program owns BLOCK consecutive elements.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if FAULT == "offsets_in_32_bits":
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    if FAULT == "contiguous_assumed":
        gate_stride, up_stride = 1, 1
    if FAULT == "half_of_768_unwritten" and n % 768 == 0:
        mask = mask & (at % 768 < 257)
    gate = tl.load(gate_ptr + at * gate_stride, mask=mask, other=0.0).to(C)
    up = tl.load(up_ptr + at * up_stride, mask=mask, other=0.0).to(C)
    if FAULT == "gate_and_up_swapped":
        gate, up = up, gate
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    if FAULT == "exp_overflows":
        sigmoid = tl.exp(gate) / (1.0 + tl.exp(gate))
    if FAULT == "hard_sigmoid":
        sigmoid = tl.minimum(tl.maximum(gate / 6.0 + 0.5, 0.0), 1.0)
    if FAULT == "silu_in_bfloat16":
        output = (gate * sigmoid).to(tl.bfloat16).to(C) * up
    else:
        output = gate * sigmoid * up
    tl.store(output_ptr + at, output.to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_gradients_kernel(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, n, FAULT: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    # One program owns BLOCK consecutive elements.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(C)
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(C)
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(C)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    if FAULT == "slope_of_sigmoid_left_out":
        slope = sigmoid
    if FAULT == "gate_not_in_the_slope":
        slope = sigmoid * (2.0 - sigmoid)
    grad_up = grad * gate * sigmoid
    if FAULT == "gradient_of_up_without_silu":
        grad_up = grad * gate
    tl.store(grad_gate_ptr + at, (grad * up * slope).to(grad_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_up_ptr + at, grad_up.to(grad_up_ptr.dtype.element_ty), mask=mask)


def in_triton(fault: str = "") -> Implementation:
    """Return swiglu in Triton for any dtype, with a fault."""

    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        gate, up = gate.reshape(-1), up.reshape(-1)
        if output.numel():
            with triton_launch.on(gate.device):
                swiglu_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
                    *(gate, up, output, gate.numel(), *gate.stride(), *up.stride()),
                    FAULT=fault,
                    C=triton_launch.COMPUTE[gate.dtype],
                    BLOCK=BLOCK,
                )
        return output

    def backward(grad: torch.Tensor, _: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple:
        given = [each.contiguous() for each in (grad, gate, up)]
        if fault == "gradients_in_place":
            results = [each.detach() for each in given[1:]]  # the saved tensors themselves
        else:
            results = [torch.empty_like(each) for each in given[1:]]
        if gate.numel():
            with triton_launch.on(gate.device):
                swiglu_gradients_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
                    *(*given, *results, gate.numel()), FAULT=fault, C=triton_launch.COMPUTE[gate.dtype], BLOCK=BLOCK
                )
        return tuple(each.reshape(gate.shape) for each in results)

    guarded = fault != "gradients_in_place"
    return differentiable(("gate", "up"), forward, backward, check_swiglu, guarded=guarded)


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "swiglu_kernel")


def right_gradients(grad: torch.Tensor, _: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple:
    share, rest = gate.sigmoid(), (-gate).sigmoid()
    return grad * up * share * (1 + gate * rest), grad * gate * share


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return swiglu in CUDA C++ for float32, with a fault."""

    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        gate, up = gate.reshape(-1), up.reshape(-1)
        if n := gate.numel():
            sizes = (n, *gate.stride(), *up.stride())
            KERNELS.launch("swiglu_kernel", fault, -(-n // BLOCK), BLOCK, gate, up, output, *sizes)
        return output

    return differentiable(("gate", "up"), forward, right_gradients, check_swiglu)


def in_torch(forward: Callable[..., torch.Tensor]) -> Implementation:
    """Return swiglu by another formula, with the right gradients."""
    return differentiable(("gate", "up"), forward, right_gradients, check_swiglu)


def clamped_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up.clamp(-2, 2)


def sigmoid_of_the_magnitude(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * gate.abs().sigmoid() * up


def gelu_in_place_of_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(gate) * up


def _of_torch(formula: Callable[..., torch.Tensor], check: Check = forward_agrees, says: str = OUTPUT) -> Fault:
    return Fault(
        name=formula.__name__,
        operation="swiglu",
        make=lambda: in_torch(formula),
        check=check,
        says=says,
        right_on=None,
    )


def _faults() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("swiglu", in_triton, in_cuda, right_on=None)
    gradient = {"check": backward_agrees, "says": GRADIENT}
    return (
        of_triton(
            "offsets_in_32_bits",
            examples=far_apart(random_case(9)),
            source="https://github.com/deepspeedai/DeepSpeed/issues/8590",
        ),
        of_triton("contiguous_assumed", right_on="a_block", source="https://github.com/vllm-project/vllm/pull/3324"),
        of_triton(
            "half_of_768_unwritten",
            check=memory_is_respected,
            says=UNWRITTEN,
            right_on="a_block",
            examples={"rows_of_768": random_case(2, 768)},
            source="https://github.com/vllm-project/vllm-xpu-kernels/issues/454",
        ),
        of_triton("silu_in_bfloat16", source="https://github.com/huggingface/kernels-community/issues/76"),
        of_triton("exp_overflows"),
        of_triton("hard_sigmoid"),
        of_triton("gate_and_up_swapped"),
        of_triton(
            "gradients_in_place",
            check=backward_passes_may_interleave,
            says="gradient|changed|written",
            source="https://github.com/linkedin/Liger-Kernel/issues/272",
        ),
        of_triton("slope_of_sigmoid_left_out", **gradient),
        of_triton("gate_not_in_the_slope", **gradient),
        of_triton("gradient_of_up_without_silu", **gradient),
        of_cuda("store_unmasked", cuda_on_cpu.OutOfBounds, right_on="a_block"),
        of_cuda("last_block_dropped", check=memory_is_respected, says=UNWRITTEN, right_on="one_element"),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=far_apart(random_case(9))),
        of_cuda("contiguous_assumed", cuda_on_cpu.OutOfBounds),
        of_cuda("slow_exp_of_gate"),
        _of_torch(gelu_in_place_of_silu),
        _of_torch(clamped_up, law(properties.output_is_linear_in_up), "left side"),
        _of_torch(sigmoid_of_the_magnitude, law(properties.a_gate_and_its_negative_add_up), "left side"),
    )


FAULTS = _faults()
