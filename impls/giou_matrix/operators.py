"""The operators of giou_matrix: the same on Triton and CUDA C++ except for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.launch import cdiv
from fourfold.backends.operators import empty_gradients
from fourfold.backends.signature import signature_of

from .torch_eager import giou_matrix as definition

SIGNATURE = signature_of(definition)
GIOU_MATRIX = SIGNATURE.operator(
    lambda boxes_a, boxes_b, mode, eps: boxes_a.new_empty((boxes_a.shape[0], boxes_b.shape[0])),
    saves=("boxes_a", "boxes_b", "mode", "eps"),
    repeats=True,
)

WARP = 32


def leaves_lanes_idle(m: int) -> bool:
    """Return whether more than a tenth of the lanes have no column, if m columns are divided among whole warps."""
    return 10 * WARP * cdiv(m, WARP) > 11 * m


def register(
    backend: str,
    tile: Callable[[torch.Tensor, torch.Tensor], tuple[int, int]],
    forward: Callable[..., None],
    backward: Callable[..., None],
    reduce: Callable[..., None],
) -> Callable[..., Any]:
    """Register ``giou_matrix_<backend>`` with its gradients, which are summed over tiles of pairs, and then over tiles.

    Args:
        backend: part of the operators' names.
        tile: ``(boxes_a, boxes_b)`` returns rows and columns of a tile.
        forward: ``(scores, boxes_a, boxes_b, tiles, enclosed, eps)`` writes the first. Boxes are contiguous, `tiles`
            are their number along each axis, and none of it is called without pairs.
        backward: ``(grad_output, boxes_a, boxes_b, sums_a, sums_b, tiles, enclosed, eps)`` writes sums over the rows
            of tiles ``[tiles[1], n, 4]`` and over their columns ``[tiles[0], m, 4]``, of the type that they are
            computed in. One that is not wanted is None.
        reduce: ``(sums, gradient)`` writes the sum over the first axis.
    """

    def contiguous(*boxes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return tensors whose boxes a vector load may take, copied if necessary."""
        aligned = (each.contiguous() for each in boxes)
        return tuple(t if t.data_ptr() % 16 == 0 else t.clone() for t in aligned)

    def tiles_of(boxes_a: torch.Tensor, boxes_b: torch.Tensor) -> tuple[int, int]:
        rows, columns = tile(boxes_a, boxes_b)
        return cdiv(boxes_a.shape[0], rows), cdiv(boxes_b.shape[0], columns)

    def run_forward(boxes_a: torch.Tensor, boxes_b: torch.Tensor, mode: str, eps: float) -> torch.Tensor:
        scores, tiles = boxes_a.new_empty((boxes_a.shape[0], boxes_b.shape[0])), tiles_of(boxes_a, boxes_b)
        if scores.numel():
            forward(scores, *contiguous(boxes_a, boxes_b), tiles, mode == "giou", eps)
        return scores

    def run_backward(
        grad_output: torch.Tensor, boxes_a: torch.Tensor, boxes_b: torch.Tensor, mode: str, eps: float, *needs: bool
    ) -> tuple[torch.Tensor, ...]:
        boxes, tiles = (boxes_a, boxes_b), tiles_of(boxes_a, boxes_b)
        gradients = empty_gradients(boxes, needs)
        options = {"dtype": torch.promote_types(boxes_a.dtype, torch.float32), "device": boxes_a.device}
        sums = [
            torch.empty((count, *of.shape), **options) if needed else None
            for count, of, needed in zip(reversed(tiles), boxes, needs)
        ]
        if grad_output.numel():
            backward(grad_output, *contiguous(*boxes), *sums, tiles, mode == "giou", eps)
        for each, gradient in zip(sums, gradients):
            if each is not None and gradient.numel():
                reduce(each, gradient)
        return gradients

    return SIGNATURE.checked(GIOU_MATRIX.register(backend, run_forward, run_backward))
