"""Planted faults in the wrapper around a right kernel: defaults, ranges of parameters, autocast, kept integers."""

from typing import Any

import torch

from fourfold import backends
from fourfold.checks.history import history_does_not_matter
from fourfold.checks.modes import autocast_changes_precision_alone
from fourfold.checks.parameters import defaults_are_the_definitions, parameters_may_be_far_from_the_usual

from .edits import Edits, edited, wrapped
from .planted import Fault, Implementation

Tensor = torch.Tensor

# ---- autocast


def half_under_autocast(right: Implementation, half: Implementation) -> Implementation:
    """Choose a kernel of float16 under autocast, whatever its dtype is."""

    def implementation(x: Tensor, y: Tensor) -> Tensor:
        return (half if torch.is_autocast_enabled(x.device.type) else right)(x=x, y=y)

    return implementation


HALF = {
    "torch": "return x + y => return (x.half() + y.half()).to(x.dtype)",
    "triton": "return x + y => return x.to(tl.float16) + y.to(tl.float16)",
    "cuda": "return x + y; => return C(__half(float(x + y)));",
}


# ---- kept integers


def offsets_kept(right: Implementation) -> Implementation:
    """Keep a copy of the offsets with the tensor and reuse it, as wrappers do that copy offsets to the host."""

    def implementation(pred: Tensor, target: Tensor, offsets: Tensor, eps: float = 1e-5) -> Tensor:
        if not hasattr(offsets, "kept"):
            offsets.kept = offsets.clone()  # type: ignore[attr-defined]
        return right(pred=pred, target=target, offsets=offsets.kept, eps=eps)  # type: ignore[attr-defined]

    return implementation


def _default(operation: str, language: str, edit: str, says: str, name: str = "another_default") -> Fault:
    """Return a fault of another default than the definition's."""
    more: dict[str, Any] = {"check": defaults_are_the_definitions, "says": rf"with {says}: output.* is .*expected"}
    return Edits(operation, language)(name, edit, **more)


def _limited(operation: str, language: str, edit: str) -> Fault:
    """Return a fault of an eps that is limited to 16."""
    more: dict[str, Any] = {"check": parameters_may_be_far_from_the_usual, "says": r"with eps=.* is .*expected"}
    return Edits(operation, language)("eps_limited", edit, **more)


def _under_autocast(language: str) -> Fault:
    def make() -> Implementation:
        half = edited("vector_add", language, HALF[language])
        return half_under_autocast(backends.load("vector_add", "torch"), half)

    says = r"under autocast to bfloat16: output.* is -?inf, expected"
    more: dict[str, Any] = {"language": language, "check": autocast_changes_precision_alone, "says": says}
    return Fault("half_under_autocast", "vector_add", make, **more)


def _kept(language: str) -> Fault:
    says = "after other values were written into its inputs: "
    make = lambda: offsets_kept(backends.load("giou_loss_ragged", language))  # noqa: E731
    more: dict[str, Any] = {"language": language, "check": history_does_not_matter, "says": says}
    return Fault("offsets_kept", "giou_loss_ragged", make, **more)


LEFT_OUT = "{} left out: its default is {}, the definition's is {}".format
EPS, PRODUCT = "eps: float = 1e-5 => eps: float =", "return right(a, b, activation, negative_slope)"
SLOPE = wrapped(
    "padded, has_descriptors, _precision_of_float32)", 'matmul(a, b, activation="none", negative_slope=0.2)', PRODUCT
)
RELU = wrapped("_padded, is_hopper_or_emulated)", 'matmul(a, b, activation="relu", negative_slope=0.01)', PRODUCT)
LIMITED = wrapped(
    "_forward, _backward))", "giou(boxes1, boxes2, eps=1e-5)", "return right(boxes1, boxes2, min(eps, 16.0))"
)
FAULTS = (
    _default("layer_norm", "torch", f"{EPS} 1e-3", LEFT_OUT("eps", "0.001", "1e-05")),
    _default("layer_norm", "torch", f"{EPS} 1e-6", LEFT_OUT("eps", "1e-06", "1e-05"), "a_default_of_another_library"),
    _default("matmul", "triton", SLOPE, LEFT_OUT("negative_slope", "0.2", "0.01")),
    _default("matmul", "cuda", RELU, LEFT_OUT("activation", "'relu'", "'none'")),
    _limited("layer_norm", "torch", "keepdim=True) + eps).sqrt() => keepdim=True) + min(eps, 16.0)).sqrt()"),
    _limited("giou", "triton", LIMITED),
    _limited("giou", "cuda", LIMITED),
    *map(_under_autocast, HALF),
    *map(_kept, backends.BACKENDS),
)
