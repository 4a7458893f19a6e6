"""Planted faults in sigmoid_focal_loss: edits of its versions in torch and Triton, and a small CUDA C++ kernel."""

import functools
from pathlib import Path

import torch
from fourfold.properties import sigmoid_focal_loss as properties
from fourfold.properties.sigmoid_focal_loss import random_case

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.memory import memory_is_respected

from .edits import Edits
from .far_apart import far_apart
from .generic import with_torchs_gradient
from .planted import UNWRITTEN, Fault, cuda_fault, named
from .planted_cuda import Planted
from .steps import Implementation

Tensor = torch.Tensor
BLOCK = 256
KERNELS = Planted(Path(__file__).with_suffix(".cu"), "sigmoid_focal_loss_kernel")


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return sigmoid_focal_loss in CUDA C++ for float32, with a fault."""

    def forward(
        logits: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "none"
    ) -> Tensor:
        losses = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        x, t = logits.reshape(-1), targets.contiguous()
        if n := x.numel():
            arguments = (x, t, losses, n, *x.stride(), alpha, gamma)
            KERNELS.launch("sigmoid_focal_loss_kernel", fault, -(-n // BLOCK), BLOCK, *arguments)
        return losses if reduction == "none" else getattr(losses, reduction)()

    return with_torchs_gradient("sigmoid_focal_loss", forward)


# fmt: off
REDUCED, WEIGHT = "getattr(losses, reduction)()) =>", "(alpha * t + (1 - alpha) * (1 - t)) =>"


def _torch_faults() -> tuple[Fault, ...]:
    of = Edits("sigmoid_focal_loss", "torch")
    return (
        of.gradient("factor_held_constant", "(gamma * log_q).exp() * => (gamma * log_q).exp().detach() *"),
        of.gradient("gradient_of_the_sum",
                    f"{REDUCED} getattr(losses, reduction)().detach() + losses.sum() - losses.sum().detach())"),
        of.law(properties.a_logit_and_its_negative_change_places, f"{WEIGHT} alpha", name="alpha_for_both"),
        of.law(properties.cross_entropies_of_both_answers_differ_by_the_logit,
               "x, t = logits.to(wide), => x, t = logits.to(wide).clamp(-50, 50),", name="logits_clamped"),
        of.law(properties.weights_scale_the_losses, f"{WEIGHT} (alpha * t + (1 - alpha) * (1 - t)) ** gamma",
               name="alpha_within_the_power"),
        # The sum is divided by the number of objects, as detectors do.
        of.law(properties.the_sum_is_that_of_the_losses, f'{REDUCED} losses.sum() / ((t > 0.5).sum().clamp(min=1)'
               ' if reduction == "mean" else 1))', name="mean_over_positives"),
    )


ENTROPY, FACTOR = "power, against * size + logarithm, mistake => power, {}, mistake", "tl.exp(gamma * log_q) =>"
P = "1.0 / (1.0 + tl.exp(-x))"


def _triton_faults() -> tuple[Fault, ...]:
    of, block = Edits("sigmoid_focal_loss", "triton"), {"right_on": "a_block"}
    return (
        # The kernel reads contiguous memory: of elements past 256, others are read.
        of("offsets_in_8_bits",
           "at < n\n    x = tl.load(logits_ptr + at => at < n\n    x = tl.load(logits_ptr + at % 256",
           right_on="one_element"),
        of("contiguous_assumed", "given = logits.contiguous(), targets.contiguous() => given = logits, targets",
           **block),
        of("log_of_sigmoid", ENTROPY.format(f"tl.where(t > 0, -t * tl.log({P}), 0.0)"
                                            f" + tl.where(t < 1, (t - 1.0) * tl.log(1.0 - {P}), 0.0)")),
        of("softplus_overflows", ENTROPY.format("tl.where(t > 0, t * tl.log(1.0 + tl.exp(-x)), 0.0)"
                                                " + tl.where(t < 1, (1.0 - t) * tl.log(1.0 + tl.exp(x)), 0.0)")),
        # log(1 + e) is 0 where e is below the roundoff. torch's own is no better.
        of("log_of_1_plus_power", "libdevice.log1p(power) => tl.log(1.0 + power)", documented=True),
        of("power_of_what_is_right", f"{FACTOR} tl.exp(gamma * tl.log(1.0 - tl.exp(log_q)))"),
        of("alpha_of_any_negative_taken_for_a_weight", "WEIGHTED=alpha >= 0 => WEIGHTED=alpha != -1", **block),
        of("gamma_of_2", f"{FACTOR} tl.exp(2.0 * log_q)", **block),
        of("alpha_of_0_taken_for_none", "WEIGHTED=alpha >= 0 => WEIGHTED=alpha > 0", **block,
           examples=named(properties, "negatives_alone_weighted")),
        of("negatives_weighted_by_1", "alpha * t + (1.0 - alpha) * (1.0 - t) => alpha * t + (1.0 - t)"),
    )


# fmt: on
def _cuda_faults() -> tuple[Fault, ...]:
    of_cuda = functools.partial(cuda_fault, "sigmoid_focal_loss", in_cuda, right_on=None)
    return (
        of_cuda("store_unmasked", cuda_on_cpu.OutOfBounds, right_on="a_block"),
        of_cuda("last_block_dropped", check=memory_is_respected, says=UNWRITTEN, right_on="one_element"),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=far_apart(random_case(9))),
        of_cuda("clamped_at_flt_min"),
        of_cuda("log_of_1_less_p"),
        of_cuda("hard_targets"),
    )


FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
