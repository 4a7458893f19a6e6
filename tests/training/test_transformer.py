"""A language model trains the same whichever backend computes its operations, on packed sequences of many lengths."""

import functools
import math
from collections.abc import Callable, Mapping

import curves
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import embedding

from fourfold.backends import BACKENDS, load, unsupported

VOCABULARY = 23
WIDTH = 32
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8
HIDDEN = 40
LAYERS = 2
LONGEST = 11
SEQUENCES = 5
STEPS = 12
BATCHES_AN_EPOCH = 3
LEARNING_RATE = 0.5
IGNORED = -100
NAMES = ("attention", "cross_entropy", "rms_norm", "rope", "swiglu")

# The implementation of each operation, by its name.
Operations = Mapping[str, Callable[..., torch.Tensor]]


class Transformer(nn.Module):
    """Grouped heads, rotary positions, gated layers, and norms before each: as Llama has them, but small.

    Args:
        operations: what computes attention, the loss, norms, rotations and gates. torch multiplies by the weights.
    """

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self.operations = operations
        shapes = {"embedding": (VOCABULARY, WIDTH), "last_norm": (WIDTH,), "head": (WIDTH, VOCABULARY)}
        for layer in range(LAYERS):
            of_layer = {
                "norm": (WIDTH,),
                "q": (WIDTH, HEADS * HEAD_SIZE),
                "k": (WIDTH, KV_HEADS * HEAD_SIZE),
                "v": (WIDTH, KV_HEADS * HEAD_SIZE),
                "out": (HEADS * HEAD_SIZE, WIDTH),
                "gated_norm": (WIDTH,),
                "gate": (WIDTH, HIDDEN),
                "up": (WIDTH, HIDDEN),
                "down": (HIDDEN, WIDTH),
            }
            shapes |= {f"{name}_{layer}": shape for name, shape in of_layer.items()}
        self.weights = nn.ParameterDict(
            {
                name: nn.Parameter(torch.ones(shape) if "norm" in name else torch.randn(shape) / math.sqrt(shape[0]))
                for name, shape in shapes.items()
            }
        )

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The loss of each sequence's next tokens: tokens are ``[total]``, sequence i begins at ``offsets[i]``."""
        place = torch.arange(len(tokens), device=tokens.device)
        sequence = torch.searchsorted(offsets, place, right=True) - 1
        positions = place - offsets[sequence]
        x = embedding(tokens, self.weights["embedding"])
        angles = positions.new_tensor(range(LONGEST), dtype=torch.float64)[:, None] / 10 ** torch.arange(
            HEAD_SIZE // 2, device=tokens.device, dtype=torch.float64
        )
        turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype), positions
        for layer in range(LAYERS):
            x = x + self._attended(x, layer, offsets, turn)
            x = x + self._gated(x, layer)
        logits = self._normalized(x, "last_norm") @ self.weights["head"]
        is_last = torch.isin(place + 1, offsets)
        target = tokens.roll(-1).masked_fill(is_last, IGNORED)
        return self.operations["cross_entropy"](logits, target, IGNORED)

    def _normalized(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.operations["rms_norm"](x, self.weights[name])

    def _attended(
        self, x: torch.Tensor, layer: int, offsets: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        x = self._normalized(x, f"norm_{layer}")
        q, k, v = ((x @ self.weights[f"{name}_{layer}"]).unflatten(1, (-1, HEAD_SIZE)) for name in ("q", "k", "v"))
        q, k = (self.operations["rope"](each, *turn) for each in (q, k))
        found = self.operations["attention"](q, k, v, offsets, offsets, True)
        return found.flatten(1) @ self.weights[f"out_{layer}"]

    def _gated(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        x = self._normalized(x, f"gated_norm_{layer}")
        gate, up = (x @ self.weights[f"{name}_{layer}"] for name in ("gate", "up"))
        return self.operations["swiglu"](gate, up) @ self.weights[f"down_{layer}"]


@functools.cache
def batches() -> list[list[torch.Tensor]]:
    """Sequences in which each token follows from the one before, of one token to `LONGEST`."""
    rng = np.random.default_rng(5)
    made = []
    for _ in range(BATCHES_AN_EPOCH):
        lengths = [1, *rng.integers(2, LONGEST + 1, SEQUENCES - 1)]
        starts = rng.integers(0, VOCABULARY, SEQUENCES)
        made.append(
            [torch.tensor([(start + 5 * i) % VOCABULARY for i in range(n)]) for start, n in zip(starts, lengths)]
        )
    return made


def of(backend: str) -> Operations:
    """The operations as a backend has them."""
    return {name: load(name, backend) for name in NAMES}


def train(operations: Operations, device: str, dtype: torch.dtype, order: np.ndarray | None = None) -> curves.Training:
    """`STEPS` steps from the same weights on the same batches.

    An `order` permutes the sequences of each batch: the mathematics stays the same, the rounding changes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(13)
        model = Transformer(operations).to(device, dtype)

    def loss_of_step(step: int) -> torch.Tensor:
        sequences = batches()[step % BATCHES_AN_EPOCH]
        if order is not None:
            sequences = [sequences[i] for i in order]
        offsets = torch.tensor([0] + [len(tokens) for tokens in sequences]).cumsum(0)
        return model(torch.cat(sequences).to(device), offsets.to(device))

    return curves.train(model, loss_of_step, STEPS, LEARNING_RATE)


@functools.cache
def exact_curve() -> np.ndarray:
    """The curve with negligible rounding: torch in float64, always on the CPU."""
    return train(of("torch"), "cpu", torch.float64).curve


@functools.cache
def allowed_deviation(device: str) -> np.ndarray:
    """How far rounding alone may take a float32 curve: that of one loss is of a sum over tokens of logarithms."""

    def curve(order: np.ndarray | None) -> np.ndarray:
        return train(of("torch"), device, torch.float32, order).curve

    roundoff = float(np.finfo(np.float32).eps) / 2
    return curves.allowed_deviation(
        curve, SEQUENCES, exact_curve(), SEQUENCES * LONGEST * math.log(VOCABULARY) * roundoff
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_curve_is_the_same_with_every_backend(device: str, backend: str) -> None:
    for operation in NAMES:
        if reason := unsupported(operation, backend, "float32", device):
            pytest.skip(reason)
    curves.assert_the_same(train(of(backend), device, torch.float32), exact_curve(), allowed_deviation(device), backend)


def test_training_lowers_the_loss_far_more_than_rounding_moves_it(device: str) -> None:
    curves.assert_lowered(exact_curve(), allowed_deviation(device), BATCHES_AN_EPOCH)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("operation", NAMES)
def test_a_gradient_off_by_a_thousandth_shows_in_the_curve(device: str, operation: str) -> None:
    right = load(operation, "torch")

    def wrong(x: torch.Tensor, *others: object) -> torch.Tensor:
        x = x.view_as(x)
        x.register_hook(lambda gradient: gradient * 1.001)
        return right(x, *others)

    curve = train({**of("torch"), operation: wrong}, device, torch.float32).curve
    assert np.any(abs(curve - exact_curve()) > allowed_deviation(device))
