"""cumsum: the reference."""

import itertools
from typing import Any

import numpy as np

Array = Any


def running_sums(x: Array, exclusive: bool, reverse: bool) -> Array:
    """Return the sums of one segment, which is not empty, from its begin or from its end."""
    x = x[..., ::-1] if reverse else x
    sums = np.cumsum(x, axis=-1)
    if exclusive:
        sums = np.concatenate([np.zeros_like(x[..., :1]), sums[..., :-1]], -1)
    return sums[..., ::-1] if reverse else sums


def forward(x: Array, offsets: Any = None, exclusive: bool = False, reverse: bool = False) -> Array:
    """Return sums along the last axis of ``x[..., n]``, each segment of ``offsets[segments + 1]`` by itself."""
    ends = [0, x.shape[-1]] if offsets is None else offsets.tolist()
    segments = [running_sums(x[..., a:b], exclusive, reverse) for a, b in itertools.pairwise(ends) if a < b]
    return np.concatenate(segments, -1) if segments else x


def backward(
    grad_output: Array, x: Array, offsets: Any = None, exclusive: bool = False, reverse: bool = False
) -> tuple[Array]:
    """Return the gradient of ``sum(grad_output * forward(x, ...))`` for x: the cotangent, summed from the other end."""
    return (forward(grad_output, offsets, exclusive, not reverse),)
