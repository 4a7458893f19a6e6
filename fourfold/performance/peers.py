"""Peers: other implementations of an operation, timed beside its backends."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fourfold import backends

Function = Callable[..., torch.Tensor]
COMPILED, LIBRARY = "compile", "library"


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Call torch's own kernel."""
    return torch.softmax(x, -1)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Call torch's own kernel."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Call torch's own kernel."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, **parameters: Any) -> torch.Tensor:
    """Call torch's own kernels."""
    return F.cross_entropy(logits, target, **parameters)


def matmul(a: torch.Tensor, b: torch.Tensor, activation: str = "none", negative_slope: float = 0.01) -> torch.Tensor:
    """Call cuBLAS (on a GPU), then a separate kernel for the activation."""
    product = a @ b
    if activation == "none":
        return product
    return F.relu(product) if activation == "relu" else F.leaky_relu(product, negative_slope)


LIBRARIES: Mapping[str, Function] = {
    "softmax": softmax,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "cross_entropy": cross_entropy,
    "matmul": matmul,
}


def of_torchvision(operation: str) -> Function | None:
    """Return torchvision's function, of paired boxes 1 - its loss; None if there is none, or no torchvision."""
    try:
        from torchvision import ops
    except ImportError:
        return None

    def giou(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
        return 1 - ops.generalized_box_iou_loss(boxes1, boxes2, eps=eps)

    def giou_matrix(
        boxes_a: torch.Tensor, boxes_b: torch.Tensor, mode: str = "giou", eps: float = 1e-5
    ) -> torch.Tensor:
        return (ops.generalized_box_iou if mode == "giou" else ops.box_iou)(boxes_a, boxes_b)

    def sigmoid_focal_loss(logits: torch.Tensor, targets: torch.Tensor, **parameters: Any) -> torch.Tensor:
        return ops.sigmoid_focal_loss(logits, targets, **parameters)

    known: dict[str, Function] = {"giou": giou, "giou_matrix": giou_matrix, "sigmoid_focal_loss": sigmoid_focal_loss}
    return known.get(operation)


def peers(operation: str) -> dict[str, Callable[[], Function]]:
    """Return the functions that make each peer when it is needed, by the peer's name."""

    def compiled() -> Function:
        # As often as it is called with shapes of its own; each is to have code of its own.
        torch.compiler.reset()
        return torch.compile(backends.load(operation, "torch"), dynamic=False)

    found: dict[str, Any] = {COMPILED: compiled}
    library = LIBRARIES.get(operation) or of_torchvision(operation)
    if library is not None:
        found[LIBRARY] = lambda: library
    return found
