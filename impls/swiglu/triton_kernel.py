"""swiglu in Triton."""

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv
from fourfold.backends.triton import launch as triton_launch

from .arguments import check_swiglu
from .operators import register


@triton.jit
def sigmoids(x):
    """Return sigmoid(x) and sigmoid(-x), each to all its digits."""
    power = tl.exp(-tl.abs(x))
    larger = 1.0 / (1.0 + power)
    return tl.where(x < 0, power * larger, larger), tl.where(x < 0, larger, power * larger)


@triton.jit
def swiglu_forward_kernel(
    gate_ptr,  # [n]
    up_ptr,  # [n]
    output_ptr,  # [n]
    n,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns BLOCK consecutive elements.
    at = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    share, _ = sigmoids(gate)
    tl.store(output_ptr + at, (gate * share * up).to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(
    grad_output_ptr,  # [n]
    gate_ptr,  # [n]
    up_ptr,  # [n]
    grad_gate_ptr,  # [n], or [0] if it is not needed
    grad_up_ptr,  # [n], or [0]
    n,
    NEEDS_GATE: tl.constexpr,
    NEEDS_UP: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns BLOCK consecutive elements.
    at = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    grad = tl.load(grad_output_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    share, rest = sigmoids(gate)
    if NEEDS_GATE:
        up = tl.load(up_ptr + at, mask=mask, other=0.0).to(COMPUTE)
        grad_gate = grad * (up * (share * (1.0 + gate * rest)))
        tl.store(grad_gate_ptr + at, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
    if NEEDS_UP:
        tl.store(grad_up_ptr + at, (grad * (gate * share)).to(grad_up_ptr.dtype.element_ty), mask=mask)


def _launch(tensors: tuple[torch.Tensor, ...], needs: tuple[bool, ...]) -> None:
    x = tensors[0]
    n, block = x.numel(), 4096 // x.element_size()
    kernel = swiglu_backward_kernel if needs else swiglu_forward_kernel
    options = {**dict(zip(("NEEDS_GATE", "NEEDS_UP"), needs)), "COMPUTE": triton_launch.COMPUTE[x.dtype]}
    index = triton_launch.index_type(n + block)
    triton_launch.launch(kernel, (cdiv(n, block),), tensors, (n,), **options, INDEX=index, BLOCK=block)


swiglu_operator = register("triton", _launch)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, elementwise: see `fourfold.impls.swiglu.torch_eager.swiglu`."""
    check_swiglu(gate, up)
    return swiglu_operator(gate, up)
