"""Planted faults in the wrapper around a right kernel: defaults, ranges of parameters, autocast, kept integers."""

from collections.abc import Callable

import torch

from fourfold import backends
from fourfold.checks.history import history_does_not_matter
from fourfold.checks.modes import autocast_changes_precision_alone
from fourfold.checks.parameters import defaults_are_the_definitions, parameters_may_be_far_from_the_usual

from .edits import edited
from .planted import Check, Fault, Implementation

Tensor = torch.Tensor

# ---- defaults and ranges


def layer_norm_of_eps(default: float = 1e-5, most: float = torch.inf) -> Implementation:
    """Return layer_norm with another default of eps, or with an eps that it limits."""
    right = backends.load("layer_norm", "torch")

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = default) -> Tensor:
        return right(x, weight, bias, min(eps, most))

    return layer_norm


def matmul_of_slope(default: float = 0.01, most: float = torch.inf) -> Implementation:
    """Return matmul in Triton with another default of negative_slope, or with one that it limits."""
    right = backends.load("matmul", "triton")

    def matmul(a: Tensor, b: Tensor, activation: str = "none", negative_slope: float = default) -> Tensor:
        return right(a=a, b=b, activation=activation, negative_slope=min(negative_slope, most))

    return matmul


def matmul_of_activation(default: str) -> Implementation:
    """Return matmul in CUDA C++ with another default of activation."""
    right = backends.load("matmul", "cuda")

    def matmul(a: Tensor, b: Tensor, activation: str = default, negative_slope: float = 0.01) -> Tensor:
        return right(a=a, b=b, activation=activation, negative_slope=negative_slope)

    return matmul


def giou_of_eps(right: Implementation, default: float = 1e-5, most: float = torch.inf) -> Implementation:
    """Return giou with another default of eps, or with an eps that it limits."""

    def giou(boxes1: Tensor, boxes2: Tensor, eps: float = default) -> Tensor:
        return right(boxes1=boxes1, boxes2=boxes2, eps=min(eps, most))

    return giou


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
    """Keep a copy of the offsets with the tensor, as wrappers do that copy them to the host, and go on using it."""

    def implementation(pred: Tensor, target: Tensor, offsets: Tensor, eps: float = 1e-5) -> Tensor:
        if not hasattr(offsets, "kept"):
            offsets.kept = offsets.clone()  # type: ignore[attr-defined]
        return right(pred=pred, target=target, offsets=offsets.kept, eps=eps)  # type: ignore[attr-defined]

    return implementation


def _fault(
    operation: str, name: str, language: str, make: Callable[[], Implementation], check: Check, says: str
) -> Fault:
    return Fault(name, operation, make, language=language, check=check, says=says)


def _default(
    operation: str, name: str, language: str, make: Callable[[], Implementation], argument: str, own: str, of: str
) -> Fault:
    """Another default than the definition's."""
    says = rf"with {argument} left out: its default is {own}, the definition's is {of}: output.* is .*expected"
    return _fault(operation, name, language, make, defaults_are_the_definitions, says)


def _limited(operation: str, language: str, make: Callable[[], Implementation]) -> Fault:
    check = parameters_may_be_far_from_the_usual
    return _fault(operation, "eps_limited", language, make, check, r"with eps=.* is .*expected")


def _under_autocast(language: str) -> Fault:
    def make() -> Implementation:
        half = edited("vector_add", language, HALF[language])
        return half_under_autocast(backends.load("vector_add", "torch"), half)

    says = r"under autocast to bfloat16: output.* is -?inf, expected"
    return _fault("vector_add", "half_under_autocast", language, make, autocast_changes_precision_alone, says)


def _kept(language: str) -> Fault:
    says = "after other values were written into its inputs: "
    make = lambda: offsets_kept(backends.load("giou_loss_ragged", language))  # noqa: E731
    return _fault("giou_loss_ragged", "offsets_kept", language, make, history_does_not_matter, says)


FAULTS = (
    _default("layer_norm", "another_default", "torch", lambda: layer_norm_of_eps(1e-3), "eps", "0.001", "1e-05"),
    _default(
        "layer_norm", "a_default_of_another_library", "torch", lambda: layer_norm_of_eps(1e-6), "eps", "1e-06", "1e-05"
    ),
    _default("matmul", "another_default", "triton", lambda: matmul_of_slope(0.2), "negative_slope", "0.2", "0.01"),
    _default(
        "matmul", "another_default", "cuda", lambda: matmul_of_activation("relu"), "activation", "'relu'", "'none'"
    ),
    _limited("layer_norm", "torch", lambda: layer_norm_of_eps(most=16.0)),
    _limited("giou", "triton", lambda: giou_of_eps(backends.load("giou", "triton"), most=16.0)),
    _limited("giou", "cuda", lambda: giou_of_eps(backends.load("giou", "cuda"), most=16.0)),
    *map(_under_autocast, HALF),
    *map(_kept, backends.BACKENDS),
)
