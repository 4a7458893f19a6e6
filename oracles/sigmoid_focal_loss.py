"""Focal loss of logits and targets: the reference."""

from typing import Any

import numpy as np

Array = Any


def terms(logits: Array, targets: Array) -> tuple[Array, ...]:
    """Return the steps that forward and backward share: of each element the sigmoids of the logit and its negative, the
    cross entropy, the logarithm of q, the probability of a mistake, and ``sigmoid(x) sigmoid(-x) / q``.

    With e = exp(-|x|) and the share u of the target that the logit speaks against, ``q = (u + e (1 - u)) / (1 + e)``.
    So nothing overflows, no logarithm is taken of 0, and small values keep their digits.
    """
    size, positive = abs(logits), logits >= 0
    power, rest = np.exp(-size), 1 - targets
    against, favoured = np.where(positive, rest, targets), np.where(positive, targets, rest)
    none = against == 0
    mistake = np.where(none, 1, against + power * favoured)
    logarithm = np.log1p(power)
    log_q = np.where(none, -size, np.log(mistake)) - logarithm
    larger = 1 / (1 + power)
    smaller = power * larger
    sigmoid, opposite = np.where(positive, larger, smaller), np.where(positive, smaller, larger)
    return sigmoid, opposite, against * size + logarithm, log_q, np.where(none, larger, smaller / mistake)


def focal_weight(log_q: Array, targets: Array, alpha: float, gamma: float) -> Array:
    """Return ``q^gamma``, times ``alpha t + (1 - alpha) (1 - t)`` unless alpha is negative."""
    factor = np.exp(gamma * log_q)
    # In the arithmetic of the targets, which may be wider than a number of Python's.
    return factor if alpha < 0 else factor * (alpha * targets + (1 - alpha * np.ones_like(targets)) * (1 - targets))


def forward(logits: Array, targets: Array, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "none") -> Array:
    """Return ``w q^gamma (t softplus(-x) + (1 - t) softplus(x))``: a sigmoid's weighted cross entropy.

    Args:
        logits: ``[...]``, x.
        targets: ``[...]``, t: 0, 1 or between.
        alpha: the weight of t = 1, beside 1 - alpha of t = 0. If negative, w is 1.
        gamma: the power of ``q = t sigmoid(-x) + (1 - t) sigmoid(x)``, the probability of a mistake.
        reduction: "none" for losses ``[...]``, "sum" for their sum, "mean" for their mean.

    Returns:
        ``[...]``, or a scalar. The mean of no losses is NaN, as 0 / 0 is.

    Source: Lin et al., Focal Loss for Dense Object Detection, ICCV 2017.
    """
    _, _, entropy, log_q, _ = terms(logits, targets)
    losses = focal_weight(log_q, targets, alpha, gamma) * entropy
    if reduction == "none":
        return losses
    total = np.sum(losses)
    return total if reduction == "sum" else total / losses.size if losses.size else total + np.nan


def backward(
    grad_output: Array,
    logits: Array,
    targets: Array,
    alpha: float = 0.25,
    gamma: float = 2.0,
    reduction: str = "none",
) -> tuple[Array]:
    """Return the gradient of ``sum(grad_output * forward(...))`` for logits."""
    sigmoid, opposite, entropy, log_q, share = terms(logits, targets)
    slope = (1 - targets) * sigmoid - targets * opposite + gamma * ((1 - 2 * targets) * (entropy * share))
    grad = grad_output / max(logits.size, 1) if reduction == "mean" else grad_output
    return (grad * (focal_weight(log_q, targets, alpha, gamma) * slope),)
