"""Curves of the loss in training, and how far rounding alone may take one from another."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass
class Training:
    """The record of a training: the loss before each step, and the largest gradient of each weight, by name."""

    curve: np.ndarray
    gradients: dict[str, float]


def train(model: nn.Module, loss_of_step: Callable[[int], torch.Tensor], steps: int, learning_rate: float) -> Training:
    """Take steps of SGD; every gradient must be finite. The steps of torch.optim import all of torch's compiler."""
    curve, gradients = [], dict.fromkeys(dict(model.named_parameters()), 0.0)
    for step in range(steps):
        model.zero_grad()
        value = loss_of_step(step)
        value.backward()
        curve.append(value.item())
        for name, weight in model.named_parameters():
            gradients[name] = max(gradients[name], float(weight.grad.abs().max()))
            assert weight.grad.isfinite().all(), (step, name)
            with torch.no_grad():
                weight -= learning_rate * weight.grad
    return Training(np.array(curve), gradients)


def allowed_deviation(
    curve: Callable[[np.ndarray | None], np.ndarray], batch: int, exact: np.ndarray, of_a_loss: float
) -> np.ndarray:
    """How far rounding alone may take a float32 curve from the exact one, step by step.

    Trainings in float32 that differ only in the order of sums show how the rounding of one step grows in the next
    ones. Their worst deviation so far is multiplied by four, because a few runs do not show the worst there is.

    Args:
        curve: trains in float32 with a permutation of each batch, or None, and gives the curve.
        batch: how many there are to permute.
        exact: the curve with negligible rounding.
        of_a_loss: the rounding error that a single loss may have, which is added.
    """
    rng = np.random.default_rng(3)
    curves = np.array([curve(order) for order in (None, *(rng.permutation(batch) for _ in range(5)))])
    return 4 * np.maximum.accumulate(abs(curves - exact).max(axis=0)) + of_a_loss


def assert_the_same(training: Training, exact: np.ndarray, allowed: np.ndarray, backend: str) -> None:
    """A backend's curve may deviate by rounding alone, and every weight must have had a gradient."""
    deviation = abs(training.curve - exact)
    worst = int(np.argmax(deviation / allowed))
    assert np.all(deviation <= allowed), (
        f"step {worst}: loss {training.curve[worst]:.9g} with {backend}, {exact[worst]:.9g} in float64,"
        f" apart by {deviation[worst]:.3g} where rounding explains {allowed[worst]:.3g}"
    )
    for name, largest in training.gradients.items():
        assert largest > 0, f"{name} never had a gradient"


def assert_lowered(exact: np.ndarray, allowed: np.ndarray, batches: int) -> None:
    """The last epoch's loss is lower than the first one's by far more than rounding: else all curves were the same."""
    first, last = exact[:batches].mean(), exact[-batches:].mean()
    assert last < first
    assert allowed.max() < np.sqrt(np.finfo(np.float32).eps) * (first - last)
