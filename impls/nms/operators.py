"""The operator of nms: the same on Triton and CUDA C++ except for the launches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fourfold.backends import operators
from fourfold.backends.launch import cdiv
from fourfold.backends.signature import signature_of

from .torch_eager import nms as definition

BLOCK = 64  # boxes whose bits make a word


class Work(NamedTuple):
    """The tensors that the kernels hand on, in the order of the scores. Integers are int64, and none initialised."""

    boxes: torch.Tensor  # [n, 4], of the type that is computed in
    order: torch.Tensor  # [n], the index of the box of each rank
    classes: torch.Tensor  # [n]; of no meaning without classes
    # [blocks, n]. Bit r of mask[c, j] says that the box of rank 64 c + r suppresses that of rank j, for blocks up to
    # that of j and boxes before j.
    mask: torch.Tensor
    words: torch.Tensor  # [blocks]. Bit r of words[c] says that the box of rank 64 c + r is kept.
    kept: torch.Tensor  # [n + 1]: the indices of the boxes that are kept, and at the end how many they are


def register(backend: str, launch: Callable[..., None]) -> Callable[..., Any]:
    """Register ``nms_<backend>``.

    Args:
        backend: part of the operator's name.
        launch: ``(work, boxes, scores, iou_threshold, idxs)`` writes work.kept. There is a box at least; idxs is int32
            or int64, or None. Tensors have any strides.
    """

    def run(boxes: torch.Tensor, *arguments: Any) -> torch.Tensor:
        n, blocks = boxes.shape[0], cdiv(boxes.shape[0], BLOCK)
        ranked = torch.empty((n, 4), dtype=torch.promote_types(boxes.dtype, torch.float32), device=boxes.device)
        shapes = (n,), (n,), (blocks, n), (blocks,), (n + 1,)
        work = Work(ranked, *(torch.empty(shape, dtype=torch.int64, device=boxes.device) for shape in shapes))
        if n == 0:
            return work.kept[:0]
        launch(work, boxes, *arguments)
        # The only wait for the device.
        return work.kept[: int(work.kept[n])]

    def fake(boxes: torch.Tensor, *_: Any) -> torch.Tensor:
        return boxes.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.int64)

    signature = signature_of(definition)
    return signature.checked(operators.define(signature.schema(f"nms_{backend}", "Tensor kept"), run, fake))
