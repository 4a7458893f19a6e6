"""A kernel in a repository of its own, with its definition: `pytest rms_norm.py` verifies it."""

import torch
import triton
import triton.language as tl

import fourfold
from fourfold import tensor, values


@fourfold.operation(x=tensor("... cols"), weight=tensor("cols"), eps=values(1e-6, 1e-5))
def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, cols, eps, BLOCK: tl.constexpr):
    """A program owns one row."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < cols
    x = tl.load(x_ptr + row * cols + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / cols + eps)
    tl.store(out_ptr + row * cols + at, x * scale * weight, mask=inside)


@fourfold.claims(gradients=False, dtypes=("float16", "bfloat16", "float32"))
def my_rms_norm(x, weight, eps):
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("x and weight must be contiguous")
    out, cols = torch.empty_like(x), x.shape[-1]
    if x.numel():
        rms_norm_kernel[(x.numel() // cols,)](x, weight, out, cols, eps, BLOCK=triton.next_power_of_2(cols))
    return out


TestRmsNorm = fourfold.suite(my_rms_norm, rms_norm)
