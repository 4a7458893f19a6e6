"""The operators of cross_entropy, which Triton and CUDA C++ share except for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.signature import signature_of

from .torch_eager import cross_entropy as definition


def empty_results(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, each row's maximum and reciprocal sum of exponentials, a mean's reciprocal count: unwritten."""
    compute = torch.float64 if logits.dtype == torch.float64 else torch.float32
    rows = logits.shape[0]
    statistics = torch.empty((2, rows), dtype=compute, device=logits.device)
    scale = torch.empty(1 if reduction == "mean" else 0, dtype=compute, device=logits.device)
    return logits.new_empty((rows,) if reduction == "none" else ()), statistics, scale


SIGNATURE = signature_of(definition)
CROSS_ENTROPY = SIGNATURE.operator(
    empty_results,
    "(Tensor output, Tensor statistics, Tensor scale)",
    saves=("logits", "target", "statistics", "scale", "ignore_index", "label_smoothing"),
    gradients={"logits": "logits"},
    repeats=True,
    public=0,
)


def register_cross_entropy(
    backend: str, forward: Callable[..., None], reduce: Callable[..., None], backward: Callable[..., None]
) -> Callable[..., Any]:
    """Register ``cross_entropy_<backend>`` with its gradient.

    Args:
        backend: part of the operator's name.
        forward: ``(losses, statistics, logits, target, ignore_index, label_smoothing)`` writes losses ``[rows]`` of any
            dtype and statistics ``[2, rows]``. It is not called without rows.
        reduce: ``(output, scale, losses, target, ignore_index)`` writes the sum of losses, or, if scale is not empty,
            their mean over rows that count, and the reciprocal of their number.
        backward: ``(grad_logits, grad_output, logits, target, statistics, scale, ignore_index, label_smoothing)``
            writes the first. It is not called without rows.
    """

    def run_forward(
        logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        output, statistics, scale = empty_results(logits, target, ignore_index, label_smoothing, reduction)
        losses = output if reduction == "none" else torch.empty_like(statistics[0])
        if logits.shape[0]:
            forward(losses, statistics, logits, target, ignore_index, label_smoothing)
        if reduction != "none":
            reduce(output, scale, losses, target, ignore_index)
        return output, statistics, scale

    def run_backward(grad_output: torch.Tensor, logits: torch.Tensor, *saved: Any) -> torch.Tensor:
        grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        if logits.shape[0]:
            backward(grad_logits, grad_output, logits, *saved)
        return grad_logits

    operator = CROSS_ENTROPY.register(backend, run_forward, run_backward)
    return SIGNATURE.checked(operator)
