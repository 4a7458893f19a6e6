"""A language model trains the same whichever backend computes its operations; the model is that of the example."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fourfold.docs.examples import train

from fourfold.backends import BACKENDS, load, unsupported

STEPS, FEW = 30, 8
Operations = dict[str, Any]


@functools.cache
def size(steps: int = STEPS) -> train.Size:
    return dataclasses.replace(train.SIZES["tiny"], steps=steps)


def losses(
    operations: Operations, device: str, steps: int, dtype: torch.dtype = torch.float32, seed: int | None = None
) -> list[float]:
    order = train.identity(size(steps)) if seed is None else train.reordered(size(steps), seed)
    return train.train(operations, size(steps), device, dtype, order)[0]


@functools.cache
def exact(steps: int) -> list[float]:
    """Return the curve with negligible rounding: torch in float64, always on the CPU."""
    return losses(train.operations_of_torch(size()), "cpu", steps, torch.float64)


@functools.cache
def others(steps: int, device: str) -> list[list[float]]:
    right = train.operations_of_torch(size())
    return [losses(right, device, steps, seed=seed) for seed in range(train.REORDERED)]


def compare_runs(operations: Operations, device: str, steps: int, of: int) -> train.Comparison:
    """Compare the first steps of a training of float32 with those of one of more steps."""
    return train.compare(losses(operations, device, steps), exact(of), others(of, device))


def backend_of(name: str, backend: str, device: str) -> Any:
    if reason := unsupported(name, backend, "float32", device):
        pytest.skip(reason)
    return load(name, backend)


@pytest.mark.parametrize("steps", [FEW, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_curve_is_the_same_with_every_backend(device: str, backend: str, steps: int) -> None:
    operations = {name: backend_of(name, backend, device) for name in train.NAMES}
    found = compare_runs({**train.operations_of_torch(size()), **operations}, device, steps, max(steps, STEPS))
    assert found.same, found


def test_the_loss_curve_of_torch_is_the_same_and_falls(device: str) -> None:
    found = compare_runs(train.operations_of_torch(size()), device, STEPS, STEPS)
    assert found.same, found
    assert sum(exact(STEPS)[-5:]) < sum(exact(STEPS)[:5]) / 2


def gradient_times(factor: float, right: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operation with the gradient of its first argument off by a factor."""

    def wrong(x: torch.Tensor, *rest: Any) -> Any:
        x = x.view_as(x)
        x.register_hook(lambda gradient: gradient * factor)
        return right(x, *rest)

    return wrong


def turned_on_in_backward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> Any:
    """Compute rope with the wrong sign in backward, which turns the cotangent further instead of back."""
    there, back = (train.rope(x, cos, sine, positions) for sine in (sin, -sin))
    return back + (there - back).detach()


def without_gradient_of_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return train.swiglu(gate.detach(), up)


def sees_the_next_token(q: Any, k: Any, v: Any, q_offsets: Any, *rest: Any) -> torch.Tensor:
    """Compute attention whose queries see one more key; no query sees a sequence's first key."""
    shifted = (x.roll(-1, 0) for x in (k, v))
    return train.attention(q, *shifted, q_offsets, *rest, longest=size().longest)


def keeps_the_residual(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[Any, Any]:
    """Compute add_rms_norm without the cotangent of the returned residual."""
    y, residual_out = train.add_rms_norm(x, residual, weight)
    return y, residual_out.detach()


def adam_without_decay(*tensors: torch.Tensor, **numbers: float) -> Any:
    return load("adam", "torch")(*tensors, **{**numbers, "weight_decay": 0.0})


WRONG: dict[str, Callable[[Operations], Operations]] = {
    **{
        f"gradient of {name} off by a thousandth": lambda right, name=name: {name: gradient_times(1.001, right[name])}
        for name in ("add_rms_norm", "attention", "rms_norm", "rope", "swiglu")
    },
    "rope is turned on in backward": lambda right: {"rope": turned_on_in_backward},
    "swiglu without the gradient of gate": lambda right: {"swiglu": without_gradient_of_gate},
    "attention to the next token": lambda right: {"attention": sees_the_next_token},
    "adam without decay": lambda right: {"adam": adam_without_decay},
    "add_rms_norm drops a cotangent": lambda right: {"add_rms_norm": keeps_the_residual},
}


@pytest.mark.full(but=4)
@pytest.mark.parametrize("way", WRONG)
def test_a_wrong_kernel_shows_in_the_curve(device: str, way: str) -> None:
    right = train.operations_of_torch(size())
    found = compare_runs({**right, **WRONG[way](right)}, device, STEPS, STEPS)
    assert not found.same, found


def test_a_factor_of_all_gradients_is_cancelled_by_adam(device: str) -> None:
    right = train.operations_of_torch(size())
    scaled = gradient_times(1.001, right["cross_entropy"])
    assert compare_runs({**right, "cross_entropy": scaled}, device, STEPS, STEPS).same


def test_a_reordered_model_computes_the_same_function() -> None:
    """In float64 the curve deviates far less than in float32, where the order of roundings changes."""
    order, still = train.reordered(size(), 3), train.identity(size())
    assert all((order[axis] != still[axis]).any() for axis in still)
    curve = losses(train.operations_of_torch(size()), "cpu", STEPS, torch.float64, seed=3)
    deviations = abs(np.array([curve, *others(STEPS, "cpu")]) - exact(STEPS)).max(axis=1)
    assert deviations[0] < deviations[1:].min() / 1000


def test_batches_are_ragged_packed_and_of_one_shape() -> None:
    order = train.identity(size())
    batches = [train.batch_of(size(), step, order) for step in range(STEPS)]
    counts = [batch.offsets.diff() for batch in batches]
    assert len({len(each) for each in counts}) == 1
    assert {int(each.sum()) for each in counts} == {size().tokens}
    lengths = {int(n) for each in counts for n in each}
    assert len(lengths) > size().longest / 2
    assert max(lengths) == size().longest
    for batch, text in zip(batches, train.texts(size())):
        assert bytes(batch.tokens.tolist()) == b"".join(each.tobytes() for each in text)
        last = batch.offsets[1:].unique() - 1
        assert batch.target[last[last >= 0]].eq(train.IGNORED).all()
        assert torch.equal(batch.target[batch.target >= 0], batch.tokens[batch.positions > 0])


@pytest.mark.parametrize(
    ("far", "runs", "probability"),
    [(0.0, 8, 1.0), (2.306, 8, 0.05), (3.355, 8, 0.01), (4.303, 2, 0.05), (2.845, 20, 0.01), (float("nan"), 8, 0.0)],
)
def test_the_chance_of_a_distance_is_that_of_students_distribution(far: float, runs: int, probability: float) -> None:
    assert train.chance(far, runs) == pytest.approx(probability, rel=2e-3)


@pytest.mark.parametrize("runs", [0, 7])
def test_the_chance_needs_an_even_number_of_runs(runs: int) -> None:
    with pytest.raises(ValueError, match=f"not {runs}"):
        train.chance(1.0, runs)
