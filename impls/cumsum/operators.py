"""The operators of cumsum: the same on Triton and CUDA C++ except for the launches."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.operators import Operator

CUMSUM = Operator(
    schema="cumsum(Tensor x, Tensor? offsets, bool exclusive, bool reverse) -> Tensor output",
    fake=lambda x, *_: x.new_empty(x.shape),
    saves=("offsets", "exclusive", "reverse"),
    gradients={"x": "grad_output"},
    repeats=True,
)


def register(backend: str, launch: Callable[..., None]) -> Callable[..., Any]:
    """Register ``cumsum_<backend>`` with its gradient, the sums of the cotangent from the other end.

    Args:
        backend: part of the operators' names.
        launch: ``(output, x, offsets, exclusive, reverse)`` writes the output; it is given no empty tensor.
    """

    def run(back: bool, x: torch.Tensor, offsets: torch.Tensor | None, exclusive: bool, reverse: bool) -> torch.Tensor:
        output = x.new_empty(x.shape)
        if x.numel():
            launch(output, x, offsets, exclusive, reverse != back)
        return output

    return CUMSUM.register(backend, functools.partial(run, False), functools.partial(run, True))
