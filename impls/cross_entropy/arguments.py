"""Argument checks of cross_entropy, the same for every backend."""

from typing import Any

import torch

from fourfold.backends.arguments import check_axes, check_choice, check_floating, check_not_negative

REDUCTIONS = ("mean", "sum", "none")


def check_cross_entropy(logits: Any, target: Any, ignore_index: int, label_smoothing: float, reduction: str) -> None:
    """Check logits ``[rows, classes]``, integer ``target[rows]`` on the same device, and the parameters.

    The values of target are checked only on the CPU and outside torch.compile, since on a GPU that would wait for the
    device. Elsewhere, a target that is no class makes the loss NaN, and nothing is read outside of the tensors.

    Raises:
        TypeError: logits is no floating-point tensor, target no int32 or int64 one, or a parameter has another type.
        ValueError: a shape is wrong, there are no classes, devices differ, or a value is out of its range.
    """
    check_floating("logits", logits)
    check_axes("logits", logits, "[rows, classes]", 2)
    if not logits.shape[1]:
        raise ValueError("logits must have at least one class, not none")
    if not isinstance(target, torch.Tensor) or target.dtype not in (torch.int32, torch.int64):
        given = target.dtype if isinstance(target, torch.Tensor) else type(target).__name__
        raise TypeError(f"target must be an int32 or int64 tensor, not {given}")
    if target.device != logits.device:
        raise ValueError(f"target must be on the device of logits, {logits.device}, not on {target.device}")
    check_axes("target", target, "[rows]", 1, logits.shape[0])
    if not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an integer, not {type(ignore_index).__name__}")
    check_not_negative("label_smoothing", label_smoothing)
    if label_smoothing > 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, not {label_smoothing}")
    check_choice("reduction", reduction, REDUCTIONS)
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = (target != ignore_index) & ((target < 0) | (target >= logits.shape[1]))
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            classes = f"a class below {logits.shape[1]} or ignore_index {ignore_index}"
            raise ValueError(f"target must be {classes}, not {int(target[row])} as in row {row}")
