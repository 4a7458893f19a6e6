"""The operators of swiglu: the same on Triton and CUDA C++ but for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.operators import Operator, empty_gradients

SWIGLU = Operator(
    schema="swiglu(Tensor gate, Tensor up) -> Tensor output",
    fake=lambda gate, up: gate.new_empty(gate.shape),
    saves=("gate", "up"),
    repeats=True,
)


def register(backend: str, launch: Callable[..., None]) -> Callable[..., Any]:
    """Register ``swiglu_<backend>`` with its gradients.

    Args:
        backend: part of the operators' names.
        launch: ``(tensors, needs)`` launches the kernel of these tensors, all without gaps and not empty: forward
            without `needs`, else backward, which writes the gradients that are needed.
    """

    def launched(given: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...], *needs: bool) -> None:
        if given[0].numel():
            launch((*(tensor.contiguous() for tensor in given), *results), needs)

    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        output = gate.new_empty(gate.shape)
        launched((gate, up), (output,))
        return output

    def backward(grad_output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *needs: bool) -> tuple:
        gradients = empty_gradients((gate, up), needs)
        launched((grad_output, gate, up), gradients, *needs)
        return gradients

    return SWIGLU.register(backend, forward, backward)
