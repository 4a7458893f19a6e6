"""The operator of nms: the same on Triton and CUDA C++ except for the launches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fourfold.backends import known_calls, operators, tuning
from fourfold.backends.launch import cdiv
from fourfold.backends.signature import signature_of

from .torch_eager import nms as definition

BLOCK = 64  # boxes whose bits make a word


class Work(NamedTuple):
    """The tensors that the kernels hand on, in the order of the scores. Integers are int64, and none initialised."""

    boxes: torch.Tensor  # [n, 4], of the type that is computed in
    order: torch.Tensor  # [n], the index of the box of each rank
    classes: torch.Tensor  # [n]; of no meaning without classes
    mask: torch.Tensor  # [blocks, n]: a bit for each pair, set if one box suppresses the other; the kernels order them
    words: torch.Tensor  # [blocks]: a bit for each box, set if it is kept (Triton) or suppressed (CUDA C++)
    kept: torch.Tensor  # [n + 1]: the indices of the boxes that are kept, and at the end how many they are


def register(backend: str, launch: Callable[..., None]) -> Callable[..., Any]:
    """Register ``nms_<backend>``.

    Args:
        backend: part of the operator's name.
        launch: ``(work, boxes, scores, iou_threshold, idxs)`` writes work.kept. There is a box at least; idxs is int32
            or int64, or None. Tensors have any strides.
    """

    def find(boxes: torch.Tensor, *arguments: Any) -> torch.Tensor:
        n, blocks = boxes.shape[0], cdiv(boxes.shape[0], BLOCK)
        ranked = torch.empty((n, 4), dtype=torch.promote_types(boxes.dtype, torch.float32), device=boxes.device)
        shapes = (n,), (n,), (blocks, n), (blocks,), (n + 1,)
        work = Work(ranked, *(torch.empty(shape, dtype=torch.int64, device=boxes.device) for shape in shapes))
        launch(work, boxes, *arguments)
        return work.kept

    signature = signature_of(definition)
    repeated = known_calls.Repeater(find, [*map(signature.names.index, signature.tensors)], tuning.nothing_forced)

    def run(boxes: torch.Tensor, *arguments: Any) -> torch.Tensor:
        n = boxes.shape[0]
        if n == 0:
            return boxes.new_empty((0,), dtype=torch.int64)
        kept = repeated(boxes, *arguments)
        return kept[: int(kept[n])]  # the only wait for the device

    def fake(boxes: torch.Tensor, *_: Any) -> torch.Tensor:
        return boxes.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.int64)

    return signature.checked(operators.define(signature.schema(f"nms_{backend}", "Tensor kept"), run, fake))
