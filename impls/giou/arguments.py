"""Argument checks of the GIoU family, the same for every backend."""

from typing import Any

import torch

from fourfold.backends.arguments import (
    check_alike,
    check_axes,
    check_floating,
    check_last_axis,
    check_positive,
    check_same,
)


def check_giou(boxes1: Any, boxes2: Any, eps: float) -> None:
    """Check boxes1 and boxes2 ``[..., 4]`` of one shape, dtype and device, and a positive eps.

    Raises:
        TypeError: a tensor is none, of integers, the dtypes differ, or eps is no number.
        ValueError: the last axis is not 4, shapes or devices differ, or eps is not positive.
    """
    check_floating("boxes1", boxes1)
    check_last_axis("boxes1", boxes1, 4)
    check_same("boxes2", boxes2, "boxes1", boxes1)
    check_positive("eps", eps)


def check_giou_loss(pred: Any, target: Any, eps: float) -> None:
    """Check pred and target ``[batch, max_boxes, 4]`` of one shape, dtype and device, and a positive eps.

    Raises:
        TypeError: a tensor is none, of integers, the dtypes differ, or eps is no number.
        ValueError: a shape is wrong, devices differ, or eps is not positive.
    """
    check_floating("pred", pred)
    check_axes("pred", pred, "[batch, max_boxes, 4]", 3, 4)
    check_same("target", target, "pred", pred)
    check_positive("eps", eps)


def check_giou_loss_ragged(pred: Any, target: Any, offsets: Any, eps: float) -> None:
    """Check ``pred[batch, max_boxes, 4]``, ``target[total, 4]``, integer ``offsets[batch + 1]``, and a positive eps.

    The values of offsets are checked only on the CPU and outside torch.compile, since on a GPU that would wait for the
    device. Elsewhere, invalid offsets make the loss NaN, and the kernels still access nothing outside of the tensors.

    Raises:
        TypeError: a tensor is none, pred and target are no floating-point tensors of one dtype, offsets no integers, or
            eps is no number.
        ValueError: a shape is wrong, devices differ, offsets do not fit, or eps is not positive.
    """
    check_floating("pred", pred)
    check_alike("target", target, "pred", pred)
    if not isinstance(offsets, torch.Tensor) or offsets.dtype not in (torch.int32, torch.int64):
        given = offsets.dtype if isinstance(offsets, torch.Tensor) else type(offsets).__name__
        raise TypeError(f"offsets must be an int32 or int64 tensor, not {given}")
    if offsets.device != pred.device:
        raise ValueError(f"offsets must be on the device of pred, {pred.device}, not on {offsets.device}")
    check_axes("pred", pred, "[batch, max_boxes, 4]", 3, 4)
    check_axes("target", target, "[total, 4]", 2, 4)
    check_axes("offsets", offsets, "[batch + 1]", 1, pred.shape[0] + 1)
    if target.shape[0] > pred.shape[0] * pred.shape[1]:
        raise ValueError(
            f"target must have at most batch * max_boxes = {pred.shape[0] * pred.shape[1]} boxes, not {target.shape[0]}"
        )
    check_positive("eps", eps)
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        check_offset_values(offsets, target.shape[0], pred.shape[1])


def check_offset_values(offsets: torch.Tensor, total: int, max_boxes: int) -> None:
    """Check that offsets rise from 0 to total in steps of 0 to max_boxes.

    Raises:
        ValueError: they do not.
    """
    if offsets[0] != 0 or offsets[-1] != total:
        raise ValueError(f"offsets must run from 0 to the {total} boxes of target, not {offsets[0]} to {offsets[-1]}")
    counts = offsets.diff()
    if bool((counts < 0).any()):
        raise ValueError(f"offsets must never fall, but do after position {int((counts < 0).nonzero()[0])}")
    if bool((counts > max_boxes).any()):
        sample = int((counts > max_boxes).nonzero()[0])
        raise ValueError(
            f"offsets give sample {sample} {int(counts[sample])} boxes, but pred holds {max_boxes} a sample"
        )
