"""Checks of the arguments of the GIoU family, the same for every backend."""

from typing import Any

import torch

from impls.arguments import check_alike, check_floating, check_positive


def check_giou(boxes1: Any, boxes2: Any, eps: float) -> None:
    """Two tensors ``[..., 4]`` of one shape, dtype and device, and a positive eps.

    Raises:
        TypeError: a tensor is none, of integers, or the dtypes differ.
        ValueError: the last axis is not 4, shapes or devices differ, or eps is not positive.
    """
    check_floating("boxes1", boxes1)
    check_alike("boxes2", boxes2, "boxes1", boxes1)
    if boxes1.ndim < 1 or boxes1.shape[-1] != 4:
        raise ValueError(f"boxes1 must have a last axis of 4, not shape {list(boxes1.shape)}")
    if boxes2.shape != boxes1.shape:
        raise ValueError(f"boxes2 must have the shape of boxes1, {list(boxes1.shape)}, not {list(boxes2.shape)}")
    check_positive("eps", eps)


def check_giou_loss(pred: Any, target: Any, eps: float) -> None:
    """Two tensors ``[batch, max_boxes, 4]`` of one shape, dtype and device, and a positive eps.

    Raises:
        TypeError: a tensor is none, of integers, or the dtypes differ.
        ValueError: a shape is wrong, devices differ, or eps is not positive.
    """
    check_floating("pred", pred)
    check_alike("target", target, "pred", pred)
    if pred.ndim != 3 or pred.shape[2] != 4:
        raise ValueError(f"pred must be [batch, max_boxes, 4], not {list(pred.shape)}")
    if target.shape != pred.shape:
        raise ValueError(f"target must have the shape of pred, {list(pred.shape)}, not {list(target.shape)}")
    check_positive("eps", eps)


def check_giou_loss_ragged(pred: Any, target: Any, offsets: Any, eps: float) -> None:
    """``pred[batch, max_boxes, 4]``, ``target[total, 4]`` and integer ``offsets[batch + 1]``, and a positive eps.

    The values of offsets are looked at only where that costs no wait for a device; on a GPU offsets that do not fit
    make the loss NaN instead, and nothing outside of the tensors is touched.

    Raises:
        TypeError: a tensor is none, pred and target are no floating-point tensors of one dtype, or offsets no integers.
        ValueError: a shape is wrong, devices differ, offsets do not fit, or eps is not positive.
    """
    check_floating("pred", pred)
    check_alike("target", target, "pred", pred)
    if not isinstance(offsets, torch.Tensor) or offsets.dtype not in (torch.int32, torch.int64):
        given = offsets.dtype if isinstance(offsets, torch.Tensor) else type(offsets).__name__
        raise TypeError(f"offsets must be an int32 or int64 tensor, not {given}")
    if offsets.device != pred.device:
        raise ValueError(f"offsets must be on the device of pred, {pred.device}, not on {offsets.device}")
    if pred.ndim != 3 or pred.shape[2] != 4:
        raise ValueError(f"pred must be [batch, max_boxes, 4], not {list(pred.shape)}")
    if target.ndim != 2 or target.shape[1] != 4:
        raise ValueError(f"target must be [total, 4], not {list(target.shape)}")
    if offsets.ndim != 1 or offsets.shape[0] != pred.shape[0] + 1:
        raise ValueError(f"offsets must be [batch + 1] = [{pred.shape[0] + 1}], not {list(offsets.shape)}")
    if target.shape[0] > pred.shape[0] * pred.shape[1]:
        raise ValueError(
            f"target must have at most batch * max_boxes = {pred.shape[0] * pred.shape[1]} boxes, not {target.shape[0]}"
        )
    check_positive("eps", eps)
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        check_offset_values(offsets, target.shape[0], pred.shape[1])


def check_offset_values(offsets: torch.Tensor, total: int, max_boxes: int) -> None:
    """Offsets must rise from 0 to total in steps of 0 to max_boxes.

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
