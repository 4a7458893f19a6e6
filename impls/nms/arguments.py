"""Argument checks of nms, the same for every backend."""

from typing import Any

import torch

from fourfold.backends.arguments import check_alike, check_axes, check_floating


def check_nms(boxes: Any, scores: Any, iou_threshold: Any, idxs: Any) -> None:
    """Check ``boxes[n, 4]``, ``scores[n]`` of the same dtype, a threshold from 0 to 1, and ``idxs[n]`` or None.

    Raises:
        TypeError: boxes or scores are no floating-point tensors or differ in dtype, idxs is no int32 or int64 tensor,
            or iou_threshold is no number.
        ValueError: a shape is wrong, devices differ, or iou_threshold is not from 0 to 1.
    """
    check_floating("boxes", boxes)
    check_axes("boxes", boxes, "[n, 4]", 2, 4)
    check_alike("scores", scores, "boxes", boxes)
    _check_one_each("scores", scores, boxes)
    if idxs is not None:
        if not isinstance(idxs, torch.Tensor) or idxs.dtype not in (torch.int32, torch.int64):
            given = idxs.dtype if isinstance(idxs, torch.Tensor) else type(idxs).__name__
            raise TypeError(f"idxs must be an int32 or int64 tensor, not {given}")
        if idxs.device != boxes.device:
            raise ValueError(f"idxs must be on the device of boxes, {boxes.device}, not on {idxs.device}")
        _check_one_each("idxs", idxs, boxes)
    try:
        within = 0.0 <= iou_threshold <= 1.0
    except TypeError:
        raise TypeError(f"iou_threshold must be a number, not {type(iou_threshold).__name__}") from None
    if not within:
        raise ValueError(f"iou_threshold must be from 0 to 1, not {iou_threshold}")


def _check_one_each(name: str, tensor: torch.Tensor, boxes: torch.Tensor) -> None:
    if tensor.shape != boxes.shape[:1]:
        raise ValueError(f"{name} must be [n] = [{boxes.shape[0]}], one for each of boxes, not {list(tensor.shape)}")
