"""The operators of the ragged losses, which Triton and CUDA C++ share except for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.signature import signature_of


def register_loss(
    definition: Callable[..., torch.Tensor], backend: str, *launches: Callable[..., Any]
) -> Callable[..., torch.Tensor]:
    """Register the operators of a loss on a backend; return the function that checks arguments and calls them."""
    signature = signature_of(definition)
    operator = signature.operator(
        lambda pred, *_: pred.new_empty(()),
        "Tensor loss",
        saves=("pred", "target", "offsets", "eps"),
        gradients={"pred": "pred", "target": "target"},
        repeats=True,
    )
    return signature.checked(operator.register(backend, *launches))
