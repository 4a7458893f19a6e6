"""Peers: other implementations of an operation, timed beside its backends.

torch.compile and torch's own kernel are always there. Others are timed where they are installed, as by
``pip install fourfold[peers]``: Liger (https://github.com/linkedin/Liger-Kernel) and quack
(https://github.com/Dao-AILab/quack). Kernels that write over their inputs, such as Liger's cross entropy, are left out:
a call on what an earlier one has left is another call.
"""

import importlib
import importlib.util
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


def _as_rows(kernel: Function) -> Function:
    """A kernel of matrices, on the rows of a tensor with any number of axes."""

    def on_rows(x: torch.Tensor, *others: torch.Tensor, **parameters: Any) -> torch.Tensor:
        return kernel(x.reshape(-1, x.shape[-1]), *others, **parameters).reshape(x.shape)

    return on_rows


def _liger_softmax(ops: Any) -> Function:
    return lambda x: ops.softmax.LigerSoftmaxFunction.apply(x)


def _liger_layer_norm(ops: Any) -> Function:
    return lambda x, weight, bias, eps=1e-5: ops.layer_norm.LigerLayerNormFunction.apply(x, weight, bias, eps)


def _liger_rms_norm(ops: Any) -> Function:
    # Not in place: otherwise its backward pass would write over the cotangent.
    return lambda x, weight, eps=1e-6: ops.rms_norm.LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


def _quack_softmax(quack: Any) -> Function:
    return _as_rows(quack.softmax.softmax)


def _quack_rms_norm(quack: Any) -> Function:
    return _as_rows(lambda x, weight, eps=1e-6: quack.rmsnorm.rmsnorm(x, weight, eps=eps))


def _quack_cross_entropy(quack: Any) -> Function:
    def cross_entropy(
        logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0, **parameters: Any
    ) -> torch.Tensor:
        if label_smoothing:
            raise NotImplementedError("quack's cross entropy has no label smoothing")
        return quack.cross_entropy.cross_entropy(logits, target, **parameters)

    return cross_entropy


# By the name of a library: its package, and for each operation the module that holds the kernel and what calls it.
INSTALLED: Mapping[str, tuple[str, Mapping[str, tuple[str, Callable[[Any], Function]]]]] = {
    "liger": (
        "liger_kernel.ops",
        {
            "softmax": ("softmax", _liger_softmax),
            "layer_norm": ("layer_norm", _liger_layer_norm),
            "rms_norm": ("rms_norm", _liger_rms_norm),
        },
    ),
    "quack": (
        "quack",
        {
            "softmax": ("softmax", _quack_softmax),
            "rms_norm": ("rmsnorm", _quack_rms_norm),
            "cross_entropy": ("cross_entropy", _quack_cross_entropy),
        },
    ),
}


def _installed(operation: str) -> dict[str, Callable[[], Function]]:
    """The kernels of installed libraries for an operation, by the library's name."""
    found: dict[str, Callable[[], Function]] = {}
    for name, (package, kernels) in INSTALLED.items():
        if operation in kernels and importlib.util.find_spec(package.partition(".")[0]):
            module, made = kernels[operation]

            def make(package: str = package, module: str = module, made: Callable[[Any], Function] = made) -> Function:
                importlib.import_module(f"{package}.{module}")
                return made(importlib.import_module(package))

            found[name] = make
    return found


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
    return found | _installed(operation)
