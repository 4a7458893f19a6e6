"""The operator of nms: the same on Triton and CUDA C++ except for the launches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fourfold.backends import operators
from fourfold.backends.launch import cdiv

BLOCK = 64  # boxes whose bits make a word


class Work(NamedTuple):
    """The tensors that the kernels hand on, in the order of the scores. None is initialised.

    Attributes:
        order: int64 ``[n]``, the index of the box of each rank.
        boxes: ``[n, 4]``, of the type that is computed in.
        classes: int64 ``[n]``; empty without classes.
        mask: int64 ``[blocks, n]``. Bit r of ``mask[c, j]`` says that the box of rank 64 c + r suppresses that of rank
            j, for blocks up to that of j and boxes before j.
        words: int64 ``[blocks]``. Bit r of ``words[c]`` says that the box of rank 64 c + r is kept.
        kept: int64 ``[n + 1]``: the indices of the boxes that are kept, and at the end how many they are.
    """

    order: torch.Tensor
    boxes: torch.Tensor
    classes: torch.Tensor
    mask: torch.Tensor
    words: torch.Tensor
    kept: torch.Tensor


def work_for(boxes: torch.Tensor, idxs: torch.Tensor | None) -> Work:
    """Return unwritten tensors for a call."""
    n = boxes.shape[0]
    blocks = cdiv(n, BLOCK)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=boxes.device)

    compute = torch.promote_types(boxes.dtype, torch.float32)
    ranked = torch.empty((n, 4), dtype=compute, device=boxes.device)
    classes = integers(0 if idxs is None else n)
    return Work(integers(n), ranked, classes, integers(blocks, n), integers(blocks), integers(n + 1))


def register(backend: str, launch: Callable[..., None]) -> Callable[..., Any]:
    """Register ``nms_<backend>``.

    Args:
        backend: part of the operator's name.
        launch: ``(work, boxes, scores, iou_threshold, idxs)`` writes work.kept. There is a box at least; idxs is int32
            or int64, or None. Tensors have any strides.
    """

    def run(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, idxs: torch.Tensor | None) -> torch.Tensor:
        work, n = work_for(boxes, idxs), boxes.shape[0]
        if n == 0:
            return work.kept[:0]
        launch(work, boxes, scores, iou_threshold, idxs)
        # The only wait for the device.
        return work.kept[: int(work.kept[n])]

    def fake(
        boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, idxs: torch.Tensor | None
    ) -> torch.Tensor:
        count = torch.library.get_ctx().new_dynamic_size()
        return boxes.new_empty((count,), dtype=torch.int64)

    schema = f"nms_{backend}(Tensor boxes, Tensor scores, float iou_threshold, Tensor? idxs) -> Tensor kept"
    return operators.define(schema, run, fake)
