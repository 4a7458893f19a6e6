"""A detector trains the same whichever backend computes its loss, on padded and on ragged batches."""

import functools
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from fourfold.docs.examples import train
from torch import nn

from fourfold.backends import BACKENDS, load, unsupported

IMAGE_SIZE = 32
MAX_BOXES = 6
BATCH = 8
STEPS = 20
BATCHES_AN_EPOCH = 4
LEARNING_RATE = 0.1

# Takes pred and the target boxes of each image; returns the loss.
Loss = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]


class Detector(nn.Module):
    """Convolutions, each halving the image, then a linear layer that gives every image `MAX_BOXES` boxes."""

    def __init__(self) -> None:
        super().__init__()
        channels = (1, 4, 8, 8)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(channels):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.boxes = nn.Linear(channels[-1] * (IMAGE_SIZE // 8) ** 2, MAX_BOXES * 4)
        # Begin with boxes that are not inverted: below eps the loss has no slope to follow.
        with torch.no_grad():
            self.boxes.bias.copy_(torch.tensor([0.25, 0.25, 0.75, 0.75]).repeat(MAX_BOXES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.boxes(self.features(images)).view(-1, MAX_BOXES, 4)


@functools.cache
def batches() -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Return grayscale images and their boxes, in units of the image's side: as many boxes as a picture has faces."""
    rng = np.random.default_rng(7)
    made = []
    for _ in range(BATCHES_AN_EPOCH):
        images = rng.integers(0, 256, (BATCH, 1, IMAGE_SIZE, IMAGE_SIZE)) / 255
        targets = []
        for count in np.clip(np.floor(np.abs(rng.normal(0, 3, BATCH))).astype(int), 0, MAX_BOXES):
            corner = rng.integers(0, IMAGE_SIZE - 1, (count, 2))
            end = np.minimum(corner + rng.integers(1, IMAGE_SIZE, (count, 2)), IMAGE_SIZE - 1)
            targets.append(torch.from_numpy(np.concatenate([corner, end], -1) / IMAGE_SIZE))
        made.append((torch.from_numpy(images), targets))
    return made


def collate_padded(targets: list[torch.Tensor]) -> torch.Tensor:
    """Pad the boxes of each image with zeros to ``[batch, max_boxes, 4]``."""
    padded = targets[0].new_zeros(len(targets), MAX_BOXES, 4)
    for row, boxes in zip(padded, targets):
        row[: len(boxes)] = boxes
    return padded


def collate_ragged(targets: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate all boxes; return them and the offsets at which each image's boxes begin."""
    counts = torch.tensor([0] + [len(boxes) for boxes in targets], device=targets[0].device)
    return torch.cat(targets), counts.cumsum(0)


def padded_loss(backend: str) -> Loss:
    implementation = load("giou_loss", backend)
    return lambda pred, targets: implementation(pred, collate_padded(targets))


def ragged_loss(backend: str) -> Loss:
    implementation = load("giou_loss_ragged", backend)
    return lambda pred, targets: implementation(pred, *collate_ragged(targets))


LOSSES = {"padded": ("giou_loss", padded_loss), "ragged": ("giou_loss_ragged", ragged_loss)}


def losses(loss: Loss, device: str, dtype: torch.dtype, order: np.ndarray | None = None) -> list[float]:
    """Return the loss before each of `STEPS` steps of SGD, from the same weights on the same batches.

    An `order` permutes the images of each batch: the mathematics stays the same, the rounding changes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = Detector().to(device, dtype)
    curve = []
    for step in range(STEPS):
        images, targets = batches()[step % BATCHES_AN_EPOCH]
        if order is not None:
            images, targets = images[order], [targets[i] for i in order]
        model.zero_grad()
        value = loss(model(images.to(device, dtype)), [boxes.to(device, dtype) for boxes in targets])
        value.backward()
        curve.append(value.item())
        with torch.no_grad():
            for weight in model.parameters():
                weight -= LEARNING_RATE * weight.grad
    return curve


@functools.cache
def exact() -> list[float]:
    """Return the curve with negligible rounding: torch's padded loss in float64, always on the CPU."""
    return losses(padded_loss("torch"), "cpu", torch.float64)


@functools.cache
def others(device: str) -> list[list[float]]:
    rng = np.random.default_rng(3)
    orders = [rng.permutation(BATCH) for _ in range(train.REORDERED)]
    return [losses(padded_loss("torch"), device, torch.float32, order) for order in orders]


def compared(loss: Loss, device: str) -> train.Comparison:
    return train.compare(losses(loss, device, torch.float32), exact(), others(device))


@pytest.mark.full(but=3)
@pytest.mark.parametrize("collate", LOSSES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_curve_is_the_same_with_every_backend(device: str, backend: str, collate: str) -> None:
    operation, make = LOSSES[collate]
    if reason := unsupported(operation, backend, "float32", device):
        pytest.skip(reason)
    found = compared(make(backend), device)
    assert found.same, found


def test_training_lowers_the_loss() -> None:
    assert sum(exact()[-BATCHES_AN_EPOCH:]) < sum(exact()[:BATCHES_AN_EPOCH])


def test_batches_have_images_without_boxes_and_full_ones() -> None:
    counts = [len(boxes) for _, targets in batches() for boxes in targets]
    assert min(counts) == 0
    assert max(counts) == MAX_BOXES
    for _, targets in batches():
        padded = collate_padded(targets)
        target, offsets = collate_ragged(targets)
        assert torch.equal(padded[padded[..., 3] > 0], target)
        assert offsets.tolist() == np.cumsum([0] + [len(boxes) for boxes in targets]).tolist()


@pytest.mark.parametrize("collate", LOSSES)
def test_a_gradient_off_by_a_thousandth_shows_in_the_curve(device: str, collate: str) -> None:
    _, make = LOSSES[collate]
    right = make("torch")

    def wrong(pred: torch.Tensor, targets: list[torch.Tensor]) -> torch.Tensor:
        pred.register_hook(lambda gradient: gradient * 1.001)
        return right(pred, targets)

    found = compared(wrong, device)
    assert not found.same, found
