"""The operators of sigmoid_focal_loss: the same on Triton and CUDA C++ except for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.operators import Operator


def empty_output(
    logits: torch.Tensor, targets: torch.Tensor, alpha: float, gamma: float, reduction: str
) -> torch.Tensor:
    """Return the output, unwritten."""
    return logits.new_empty(logits.shape if reduction == "none" else ())


SIGMOID_FOCAL_LOSS = Operator(
    schema="sigmoid_focal_loss(Tensor logits, Tensor targets, float alpha, float gamma, str reduction)"
    " -> Tensor output",
    fake=empty_output,
    saves=("logits", "targets", "alpha", "gamma", "reduction"),
    gradients={"logits": "logits"},
    repeats=True,
)


def register(
    backend: str,
    blocks: Callable[..., int],
    forward: Callable[..., None],
    reduce: Callable[..., None],
    backward: Callable[..., None],
) -> Callable[..., Any]:
    """Register ``sigmoid_focal_loss_<backend>`` with its gradient. All tensors of the launches are contiguous.

    Args:
        backend: part of the operators' names.
        blocks: of ``(logits, targets)``, how many sums `forward` writes.
        forward: ``(results, logits, targets, alpha, gamma, summed)`` writes losses, or sums of them in the type that
            they are computed in. It is not called without elements.
        reduce: ``(output, sums, divisor)`` writes the sum of sums over the divisor.
        backward: ``(grad_logits, grad_output, logits, targets, alpha, gamma, divisor)`` writes the first, from a
            cotangent over the divisor. It is not called without elements.
    """

    def run_forward(
        logits: torch.Tensor, targets: torch.Tensor, alpha: float, gamma: float, reduction: str
    ) -> torch.Tensor:
        output, n, summed = empty_output(logits, targets, alpha, gamma, reduction), logits.numel(), reduction != "none"
        given = logits.contiguous(), targets.contiguous()
        compute = torch.promote_types(logits.dtype, torch.float32)
        results = torch.empty(blocks(*given), dtype=compute, device=logits.device) if summed else output
        if n:
            forward(results, *given, alpha, gamma, summed)
        if summed:
            reduce(output, results, n if reduction == "mean" else 1)
        return output

    def run_backward(
        grad_output: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, *parameters: Any
    ) -> torch.Tensor:
        alpha, gamma, reduction = parameters
        grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        if n := logits.numel():
            given = (tensor.contiguous() for tensor in (grad_output, logits, targets))
            backward(grad_logits, *given, alpha, gamma, n if reduction == "mean" else 1)
        return grad_logits

    return SIGMOID_FOCAL_LOSS.register(backend, run_forward, run_backward)
