"""Planted faults in sigmoid_focal_loss: edits of its versions in torch, Triton and CUDA C++."""

from fourfold.properties import sigmoid_focal_loss as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.memory import memory_is_respected

from .edits import Edits
from .planted import UNWRITTEN, Fault, named
from .planted_vector_add import IN_CUDA

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
        # The kernel assumes contiguous memory: it reads wrong elements past 256.
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


OF_ENTROPY = "entropy = against * size + logarithm; =>"
LEAST = "C(1.17549435e-38)"


def _cuda_faults() -> tuple[Fault, ...]:
    of = Edits("sigmoid_focal_loss", "cuda")
    return (
        of.stopped("store_unmasked", cuda_on_cpu.OutOfBounds, IN_CUDA["store_unmasked"], right_on="a_block"),
        of("last_block_dropped", "cuda_elementwise.py: width * owned), => width * owned) - 1 or 1,",
           check=memory_is_respected, says=UNWRITTEN, right_on="one_element"),
        # The kernel assumes contiguous memory: it reads wrong vectors past 64.
        of("offsets_in_8_bits", "elementwise.cuh: taken[k] + i * WIDTH => taken[k] + i % 64 * WIDTH",
           right_on="one_element"),
        # Based on log(p) and log(1 - p), with 0 replaced by the smallest normal number, as in the CUDA kernel of mmcv.
        of("clamped_at_flt_min", f"{OF_ENTROPY} const C p = C(1) / (C(1) + exp(-x));\n"
           f"        entropy = -t * log(fmax(p, {LEAST})) - (C(1) - t) * log(fmax(C(1) - p, {LEAST}));"),
        of("log_of_1_less_p", f"{OF_ENTROPY} const C p = C(1) / (C(1) + exp(-x));\n"
           "        entropy = t * (fmax(-x, C(0)) + logarithm) - (t < C(1) ? (C(1) - t) * log(C(1) - p) : C(0));"),
        of("hard_targets", "terms(x[0], x[1], => terms(x[0], C(x[1] > C(0.5)),"),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
