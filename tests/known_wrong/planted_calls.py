"""Planted faults in the wrapper around a right kernel: defaults, ranges of parameters, autocast, kept integers."""

from collections.abc import Callable
from typing import Any

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


def _faults() -> tuple[Fault, ...]:
    def fault(
        operation: str,
        name: str,
        language: str,
        make: Callable[[], Implementation],
        check: Check,
        says: str,
        **more: Any,
    ) -> Fault:
        return Fault(
            operation=operation,
            name=name,
            language=language,
            make=make,
            check=check,
            says=says,
            **{"right_on": None, **more},
        )

    defaults, ranges = defaults_are_the_definitions, parameters_may_be_far_from_the_usual
    autocast, history = autocast_changes_precision_alone, history_does_not_matter
    overflow = r"under autocast to bfloat16: output.* is -?inf, expected"
    far = r"with eps=.* is .*expected"
    kept = "after other values were written into its inputs: "

    def left_out(name: str, own: str, of_definition: str) -> str:
        return (
            rf"with {name} left out: its default is {own}, the definition's is {of_definition}: output.* is .*expected"
        )

    return (
        fault(
            "layer_norm", "another_default", "torch", lambda: layer_norm_of_eps(1e-3), defaults,
            left_out("eps", "0.001", "1e-05"),
        ),
        fault(
            "layer_norm", "a_default_of_another_library", "torch", lambda: layer_norm_of_eps(1e-6), defaults,
            left_out("eps", "1e-06", "1e-05"),
        ),
        fault(
            "matmul", "another_default", "triton", lambda: matmul_of_slope(0.2), defaults,
            left_out("negative_slope", "0.2", "0.01"),
        ),
        fault(
            "matmul", "another_default", "cuda", lambda: matmul_of_activation("relu"), defaults,
            left_out("activation", "'relu'", "'none'"),
        ),
        fault("layer_norm", "eps_limited", "torch", lambda: layer_norm_of_eps(most=16.0), ranges, far),
        fault(
            "giou", "eps_limited", "triton", lambda: giou_of_eps(backends.load("giou", "triton"), most=16.0), ranges,
            r"with eps=.* is .*expected",
        ),
        fault(
            "giou", "eps_limited", "cuda", lambda: giou_of_eps(backends.load("giou", "cuda"), most=16.0), ranges,
            r"with eps=.* is .*expected",
        ),
        *(
            fault(
                "vector_add", "half_under_autocast", language,
                lambda language=language, edit=edit: half_under_autocast(
                    backends.load("vector_add", "torch"), edited("vector_add", language, edit)
                ),
                autocast, overflow,
            )
            for language, edit in HALF.items()
        ),
        *(
            fault(
                "giou_loss_ragged", "offsets_kept", language,
                lambda language=language: offsets_kept(backends.load("giou_loss_ragged", language)), history, kept,
            )
            for language in backends.BACKENDS
        ),
    )  # fmt: skip


FAULTS = _faults()
