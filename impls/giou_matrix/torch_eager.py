"""giou_matrix in torch operations: the baseline, and the argument checks of every backend."""

from typing import Any

import torch

from fourfold.backends.arguments import check_alike, check_axes, check_choice, check_floating, check_positive

from ..giou.torch_eager import in_compute_dtype, pairwise_giou


def check_giou_matrix(boxes_a: Any, boxes_b: Any, mode: str, eps: float) -> None:
    """Check boxes_a ``[n, 4]`` and boxes_b ``[m, 4]`` of one dtype and device, the mode, and a positive eps.

    Raises:
        TypeError: a tensor is none, of integers, the dtypes differ, or a parameter has another type.
        ValueError: a shape is wrong, devices differ, the mode is unknown, or eps is not positive.
    """
    check_floating("boxes_a", boxes_a)
    check_axes("boxes_a", boxes_a, "[n, 4]", 2, 4)
    check_alike("boxes_b", boxes_b, "boxes_a", boxes_a)
    check_axes("boxes_b", boxes_b, "[m, 4]", 2, 4)
    check_choice("mode", mode, ("giou", "iou"))
    check_positive("eps", eps)


def giou_matrix(boxes_a: torch.Tensor, boxes_b: torch.Tensor, mode: str = "giou", eps: float = 1e-5) -> torch.Tensor:
    """Return the generalized IoU of each box of boxes_a with each of boxes_b, as detectors match them.

    Args:
        boxes_a: ``[n, 4]`` as ``(x1, y1, x2, y2)``; float16, bfloat16, float32 or float64, any strides.
        boxes_b: ``[m, 4]`` of the same dtype and device.
        mode: "giou" for I / U - (C - U) / C, "iou" for I / U.
        eps: least area of the union U and of the smallest enclosing box C.

    Returns:
        ``[n, m]`` of the same dtype. For each pair, what `fourfold.impls.giou.torch_eager.giou` says of it holds: of
        ties, of inverted boxes and those without area, of NaN and infinity.

    Raises:
        TypeError: a tensor is none, of integers, the dtypes differ, or a parameter has another type.
        ValueError: a shape is wrong, devices differ, the mode is unknown, or eps is not positive and finite.

    Source: Rezatofighi et al., Generalized Intersection over Union, CVPR 2019; torchvision.ops.generalized_box_iou.
    """
    check_giou_matrix(boxes_a, boxes_b, mode, eps)
    # Expanded, so that autograd sums over pairs in the last step: before it, infinities of both signs may meet.
    shape = boxes_a.shape[0], boxes_b.shape[0], 4
    a, b = in_compute_dtype(boxes_a)[:, None].expand(shape), in_compute_dtype(boxes_b)[None].expand(shape)
    return pairwise_giou(a, b, eps, mode == "giou").to(boxes_a.dtype)
