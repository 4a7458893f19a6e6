"""The operators of cross_entropy, which Triton and CUDA C++ share except for the launches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fourfold.backends.signature import signature_of

from .torch_eager import cross_entropy as definition

# The most rows whose losses forward reduces itself, which saves a launch. A single block takes its time for more; on
# the CPU, few cases have as few rows, so that tests reach both ways.
FEW_ROWS = {"cuda": 1024, "cpu": 40}


class Reduced(NamedTuple):
    """What the losses of all rows are reduced to.

    Attributes:
        output: a scalar: the sum, or, if scale is not empty, the mean over rows that count.
        scale: the reciprocal of the number of those rows; empty where the sum is wanted.
    """

    output: torch.Tensor
    scale: torch.Tensor


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
        forward: ``(losses, statistics, reduced, logits, target, ignore_index, label_smoothing)`` writes losses
            ``[rows]`` of any dtype and statistics ``[2, rows]``. Of few rows it also writes what is `Reduced`, with
            losses of the dtype of statistics; else this is None. It is not called without rows.
        reduce: ``(reduced, losses, target, ignore_index)`` writes what is `Reduced` of many rows, or of none.
        backward: ``(grad_logits, grad_output, logits, target, statistics, scale, ignore_index, label_smoothing)``
            writes the first. It is not called without rows.
    """

    def run_forward(
        logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        output, statistics, scale = empty_results(logits, target, ignore_index, label_smoothing, reduction)
        losses = output if reduction == "none" else torch.empty_like(statistics[0])
        reduced, rows = None if reduction == "none" else Reduced(output, scale), logits.shape[0]
        in_forward = reduced if 0 < rows <= FEW_ROWS[logits.device.type] else None
        if rows:
            forward(losses, statistics, in_forward, logits, target, ignore_index, label_smoothing)
        if reduced is not in_forward:
            reduce(reduced, losses, target, ignore_index)
        return output, statistics, scale

    def run_backward(grad_output: torch.Tensor, logits: torch.Tensor, *saved: Any) -> torch.Tensor:
        grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        if logits.shape[0]:
            backward(grad_logits, grad_output, logits, *saved)
        return grad_logits

    operator = CROSS_ENTROPY.register(backend, run_forward, run_backward)
    return SIGNATURE.checked(operator)
