"""adam in Triton: one kernel reads everything once, and writes param and its states where they are."""

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv
from fourfold.backends.triton import launch as triton_launch

from ..triton_elementwise import block_of
from .operators import Factors, register

BLOCK = 1024


@triton.jit
def adam_kernel(
    param_ptr,  # [n]
    grad_ptr,  # [n]
    m_ptr,  # [n]
    v_ptr,  # [n]
    n,
    kept: tl.float64,  # else Triton rounds these to float32
    rate: tl.float64,
    root: tl.float64,
    eps: tl.float64,
    beta1: tl.float64,
    new1: tl.float64,
    beta2: tl.float64,
    new2: tl.float64,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns BLOCK consecutive elements.
    at = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    param = tl.load(param_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    m = tl.load(m_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    v = tl.load(v_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    m = tl.cast(beta1, COMPUTE) * m + tl.cast(new1, COMPUTE) * grad
    v = tl.cast(beta2, COMPUTE) * v + tl.cast(new2, COMPUTE) * (grad * grad)
    step = m / (tl.sqrt(v) * tl.cast(root, COMPUTE) + tl.cast(eps, COMPUTE))
    param = tl.cast(kept, COMPUTE) * param - tl.cast(rate, COMPUTE) * step
    tl.store(param_ptr + at, param.to(param_ptr.dtype.element_ty), mask=mask)
    tl.store(m_ptr + at, m.to(tl.float32), mask=mask)
    tl.store(v_ptr + at, v.to(tl.float32), mask=mask)


def _launch(param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, factors: Factors) -> None:
    n, block = param.numel(), block_of(param, BLOCK)
    triton_launch.launch(
        adam_kernel,
        (cdiv(n, block),),
        (param, grad, m, v),
        (n, *factors),
        COMPUTE=triton_launch.COMPUTE[param.dtype],
        INDEX=triton_launch.index_type(n + block),
        BLOCK=block,
    )


adam = register("triton", _launch)
