"""Planted faults in sigmoid_focal_loss: in small kernels of Triton and CUDA C++, and in torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from fourfold.impls.sigmoid_focal_loss.arguments import check_sigmoid_focal_loss
from fourfold.impls.sigmoid_focal_loss.torch_eager import sigmoid_focal_loss as right
from fourfold.properties import sigmoid_focal_loss as properties
from fourfold.properties.sigmoid_focal_loss import random_case
from triton.language.extra import libdevice

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.forward import forward_agrees
from fourfold.checks.memory import memory_is_respected

from .far_apart import far_apart
from .planted import GRADIENT, OUTPUT, UNWRITTEN, Check, Fault, kernel_faults, law, named
from .planted_cuda import Planted
from .steps import Implementation, differentiable, in_compute_dtype

Tensor = torch.Tensor
BLOCK = 256
NAMES = ("logits", "targets")
DEFAULTS = {"alpha": 0.25, "gamma": 2.0, "reduction": "none"}


def right_gradients(grad: Tensor, _: Tensor, logits: Tensor, targets: Tensor, **parameters: Any) -> tuple:
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(right(leaf, targets, **parameters), leaf, grad)[0], None


def mean_or_sum(losses: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return losses if reduction == "none" else getattr(losses, reduction)()


def wired(
    losses_of: Callable[..., Tensor], gradients: Callable[..., tuple] = right_gradients, reduce: Any = mean_or_sum
) -> Implementation:
    """Make sigmoid_focal_loss from ``losses_of(logits, targets, alpha, gamma)``, in the compute dtype."""

    def forward(logits: Tensor, targets: Tensor, alpha: float, gamma: float, reduction: str) -> Tensor:
        return reduce(losses_of(logits, targets, alpha, gamma), targets, reduction).to(logits.dtype)

    return differentiable(NAMES, forward, gradients, check_sigmoid_focal_loss, **DEFAULTS)


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + libdevice.log1p(tl.exp(-tl.abs(x)))


@triton.jit
def sigmoid_focal_loss_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    n,
    logits_stride,
    targets_stride,
    alpha: tl.float64,
    gamma: tl.float64,
    FAULT: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns BLOCK consecutive elements.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if FAULT == "offsets_in_32_bits":
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if FAULT == "contiguous_assumed":
        logits_stride, targets_stride = 1, 1
    mask = at < n
    x = tl.load(logits_ptr + at * logits_stride, mask=mask, other=0.0).to(C)
    t = tl.load(targets_ptr + at * targets_stride, mask=mask, other=0.0).to(C)
    alpha, gamma = tl.full((), alpha, C), tl.full((), gamma, C)
    p, rest = 1.0 / (1.0 + tl.exp(-x)), 1.0 / (1.0 + tl.exp(x))
    of_one, of_zero = softplus(-x), softplus(x)
    if FAULT == "log_of_sigmoid":
        of_one, of_zero = -tl.log(p), -tl.log(1.0 - p)
    if FAULT == "softplus_overflows":
        of_one, of_zero = tl.log(1.0 + tl.exp(-x)), tl.log(1.0 + tl.exp(x))
    if FAULT == "log_of_1_plus_power":
        of_zero = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    entropy = tl.where(t > 0, t * of_one, 0.0) + tl.where(t < 1, (1.0 - t) * of_zero, 0.0)
    mistake = t * rest + (1.0 - t) * p
    if FAULT == "power_of_what_is_right":
        mistake = t * p + (1.0 - t) * rest
    if FAULT == "gamma_of_2":
        factor = mistake * mistake
    else:
        factor = tl.where(gamma == 0, 1.0, libdevice.pow(mistake, gamma))
    weight = alpha * t + (1.0 - alpha) * (1.0 - t)
    if FAULT == "alpha_of_0_taken_for_none":
        weight = tl.where(alpha > 0, weight, 1.0)
    else:
        weight = tl.where(alpha >= 0, weight, 1.0)
    if FAULT == "negatives_weighted_by_1":
        weight = tl.where(alpha >= 0, alpha * t + (1.0 - t), 1.0)
    tl.store(losses_ptr + at, weight * factor * entropy, mask=mask)


def in_triton(fault: str = "") -> Implementation:
    """Return sigmoid_focal_loss in Triton for any dtype, with a fault."""

    def losses_of(logits: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
        losses = torch.empty(logits.shape, dtype=in_compute_dtype(logits).dtype, device=logits.device)
        x, t = logits.reshape(-1), targets.reshape(-1)
        if n := x.numel():
            with triton_launch.on(x.device):
                sigmoid_focal_loss_kernel[(triton.cdiv(n, BLOCK),)](
                    *(x, t, losses, n, *x.stride(), *t.stride(), alpha, gamma),
                    FAULT=fault,
                    C=triton_launch.COMPUTE[x.dtype],
                    BLOCK=BLOCK,
                )
        return losses

    return wired(losses_of)


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "sigmoid_focal_loss_kernel")


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return sigmoid_focal_loss in CUDA C++ for float32, with a fault."""

    def losses_of(logits: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
        losses = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        x, t = logits.reshape(-1), targets.contiguous()
        if n := x.numel():
            arguments = (x, t, losses, n, *x.stride(), alpha, gamma)
            KERNELS.launch("sigmoid_focal_loss_kernel", fault, -(-n // BLOCK), BLOCK, *arguments)
        return losses

    return wired(losses_of)


def of_steps(logits: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
    return right(in_compute_dtype(logits), in_compute_dtype(targets), alpha, gamma)


def alpha_for_both(logits: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
    return of_steps(logits, targets, -1.0, gamma) * (alpha if alpha >= 0 else 1.0)


def alpha_within_the_power(logits: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
    weight = (alpha * targets + (1 - alpha) * (1 - targets)) ** gamma if alpha >= 0 else 1.0
    return of_steps(logits, targets, -1.0, gamma) * weight


def logits_clamped(logits: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
    return of_steps(logits.clamp(-50, 50), targets, alpha, gamma)


def mean_over_positives(losses: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Divide by the number of objects, as detectors do with the sum."""
    return (
        losses.sum() / (targets > 0.5).sum().clamp(min=1)
        if reduction == "mean"
        else mean_or_sum(losses, targets, reduction)
    )


def factor_held_constant(grad: Tensor, _: Tensor, logits: Tensor, targets: Tensor, **parameters: Any) -> tuple:
    """Take q^gamma for a constant, as a factor that is detached."""
    x, t = logits.double(), targets.double()
    q = t * torch.sigmoid(-x) + (1 - t) * torch.sigmoid(x)
    weight = parameters["alpha"] * t + (1 - parameters["alpha"]) * (1 - t) if parameters["alpha"] >= 0 else 1.0
    slope = weight * q ** parameters["gamma"] * (torch.sigmoid(x) - t)
    count = x.numel() if parameters["reduction"] == "mean" else 1
    return (grad.double() * slope / count).to(logits.dtype), None


def gradient_of_the_sum(grad: Tensor, _: Tensor, logits: Tensor, targets: Tensor, **parameters: Any) -> tuple:
    return right_gradients(
        grad, _, logits, targets, **{**parameters, "reduction": "sum"} if not grad.ndim else parameters
    )


def _of_torch(name: str, check: Check = forward_agrees, says: str = OUTPUT, **steps: Any) -> Fault:
    steps = {"losses_of": of_steps, **steps}
    return Fault(
        name=name,
        operation="sigmoid_focal_loss",
        make=lambda: wired(**steps),
        check=check,
        says=says,
        right_on=None,
    )


def _faults() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("sigmoid_focal_loss", in_triton, in_cuda, right_on=None)
    gradient = {"check": backward_agrees, "says": GRADIENT}
    return (
        of_triton("offsets_in_32_bits", examples=far_apart(random_case(9))),
        of_triton("contiguous_assumed", right_on="a_block"),
        of_triton("log_of_sigmoid"),
        of_triton("softplus_overflows"),
        # log(1 + e) is 0 where e is below the roundoff. torch's own is no better.
        of_triton("log_of_1_plus_power", documented_ties=True),
        of_triton("power_of_what_is_right"),
        of_triton("gamma_of_2", right_on="a_block"),
        of_triton(
            "alpha_of_0_taken_for_none",
            right_on="a_block",
            examples=named(properties, "negatives_alone_weighted"),
        ),
        of_triton("negatives_weighted_by_1"),
        of_cuda("store_unmasked", cuda_on_cpu.OutOfBounds, right_on="a_block"),
        of_cuda("last_block_dropped", check=memory_is_respected, says=UNWRITTEN, right_on="one_element"),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=far_apart(random_case(9))),
        of_cuda("clamped_at_flt_min"),
        of_cuda("log_of_1_less_p"),
        of_cuda("hard_targets"),
        _of_torch("factor_held_constant", gradients=factor_held_constant, **gradient),
        _of_torch("gradient_of_the_sum", gradients=gradient_of_the_sum, **gradient),
        _of_torch(
            "alpha_for_both",
            law(properties.a_logit_and_its_negative_change_places),
            "left side",
            losses_of=alpha_for_both,
        ),
        _of_torch(
            "logits_clamped",
            law(properties.cross_entropies_of_both_answers_differ_by_the_logit),
            "left side",
            losses_of=logits_clamped,
        ),
        _of_torch(
            "alpha_within_the_power",
            law(properties.weights_scale_the_losses),
            "left side",
            losses_of=alpha_within_the_power,
        ),
        _of_torch(
            "mean_over_positives",
            law(properties.the_sum_is_that_of_the_losses),
            "left side",
            reduce=mean_over_positives,
        ),
    )


FAULTS = _faults()
