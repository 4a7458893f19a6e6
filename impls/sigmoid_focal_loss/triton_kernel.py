"""sigmoid_focal_loss in Triton: one pass forward, with a sum for each program where they are reduced, one backward."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from fourfold.backends.launch import cdiv
from fourfold.backends.triton import launch as triton_launch

from ..triton_elementwise import block_of
from .operators import register

# Sums that are added at once.
REDUCED = 1024


@triton.jit
def terms(x, t, alpha, gamma, WEIGHTED: tl.constexpr):
    """Return e = exp(-|x|), the cross entropy, (u + e (1 - u)) / (1 + e) without its divisor, and w q^gamma.

    u, the share of the target that the logit speaks against, is 0 where the third result is.
    """
    size = tl.abs(x)
    power = tl.exp(-size)
    against = tl.where(x >= 0, 1.0 - t, t)
    mistake = tl.where(against == 0, 0.0, against + power * tl.where(x >= 0, t, 1.0 - t))
    logarithm = libdevice.log1p(power)
    log_q = tl.where(against == 0, -size, tl.log(tl.where(against == 0, 1.0, mistake))) - logarithm
    weight = tl.exp(gamma * log_q)
    if WEIGHTED:
        weight *= alpha * t + (1.0 - alpha) * (1.0 - t)
    return power, against * size + logarithm, mistake, weight


@triton.jit
def sigmoid_focal_loss_forward_kernel(
    logits_ptr,  # [n]
    targets_ptr,  # [n]
    results_ptr,  # losses [n], or their sums [programs]
    n,
    alpha: tl.float64,  # else Triton rounds it to float32
    gamma: tl.float64,
    SUMMED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns BLOCK consecutive elements.
    at = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(logits_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    t = tl.load(targets_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    _, entropy, _, weight = terms(x, t, tl.full((), alpha, COMPUTE), tl.full((), gamma, COMPUTE), WEIGHTED)
    losses = weight * entropy
    if SUMMED:
        tl.store(results_ptr + tl.program_id(0), tl.sum(tl.where(mask, losses, 0.0), axis=0))
    else:
        tl.store(results_ptr + at, losses.to(results_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sigmoid_focal_loss_reduce_kernel(
    sums_ptr,  # [count]
    output_ptr,  # a scalar
    count,
    divisor,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns all sums.
    sums = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(sums_ptr + at, mask=at < count, other=0.0)
    output = tl.sum(sums, axis=0) / tl.full((), divisor, COMPUTE)
    tl.store(output_ptr, output.to(output_ptr.dtype.element_ty))


@triton.jit
def sigmoid_focal_loss_backward_kernel(
    grad_output_ptr,  # [n], or a scalar
    logits_ptr,  # [n]
    targets_ptr,  # [n]
    grad_logits_ptr,  # [n]
    n,
    alpha: tl.float64,
    gamma: tl.float64,
    divisor,
    EACH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns BLOCK consecutive elements.
    at = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    if EACH:
        grad = tl.load(grad_output_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    else:
        grad = tl.load(grad_output_ptr).to(COMPUTE) / tl.full((), divisor, COMPUTE)
    x = tl.load(logits_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    t = tl.load(targets_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    gamma = tl.full((), gamma, COMPUTE)
    power, entropy, mistake, weight = terms(x, t, tl.full((), alpha, COMPUTE), gamma, WEIGHTED)
    larger = 1.0 / (1.0 + power)
    smaller = power * larger
    share = tl.where(mistake == 0, larger, smaller / tl.where(mistake == 0, 1.0, mistake))
    slope = (1.0 - t) * tl.where(x >= 0, larger, smaller) - t * tl.where(x >= 0, smaller, larger)
    slope += gamma * ((1.0 - 2.0 * t) * (entropy * share))
    tl.store(grad_logits_ptr + at, (grad * (weight * slope)).to(grad_logits_ptr.dtype.element_ty), mask=mask)


def _block(logits: torch.Tensor) -> int:
    return block_of(logits, 4096 // logits.element_size())


def _blocks(logits: torch.Tensor, targets: torch.Tensor) -> int:
    return cdiv(logits.numel(), _block(logits))


def _launch(kernel: Any, tensors: tuple[torch.Tensor, ...], alpha: float, *scalars: float, **options: bool) -> None:
    logits = tensors[-3]
    compute, block, n = triton_launch.COMPUTE[logits.dtype], _block(logits), logits.numel()
    parts = {"COMPUTE": compute, "INDEX": triton_launch.index_type(n + block), "BLOCK": block}
    scalars = (n, alpha, *scalars)
    triton_launch.launch(kernel, (cdiv(n, block),), tensors, scalars, **options, WEIGHTED=alpha >= 0, **parts)


def _forward(
    results: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, alpha: float, gamma: float, summed: bool
) -> None:
    _launch(sigmoid_focal_loss_forward_kernel, (logits, targets, results), alpha, gamma, SUMMED=summed)


def _reduce(output: torch.Tensor, sums: torch.Tensor, divisor: int) -> None:
    options = {"COMPUTE": triton_launch.COMPUTE[sums.dtype], "BLOCK": REDUCED}
    triton_launch.launch(sigmoid_focal_loss_reduce_kernel, (1,), (sums, output), (sums.shape[0], divisor), **options)


def _backward(
    grad_logits: torch.Tensor, grad_output: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, *scalars: Any
) -> None:
    tensors, each = (grad_output, logits, targets, grad_logits), grad_output.shape == logits.shape
    _launch(sigmoid_focal_loss_backward_kernel, tensors, *scalars, EACH=each)


sigmoid_focal_loss = register("triton", _blocks, _forward, _reduce, _backward)
