"""nms in torch operations: the baseline."""

import torch

from fourfold.backends.signature import integers, number, signature, tensor

ROWS = 1024  # boxes that are compared with all others at a time


@signature(
    boxes=tensor("n 4"),
    scores=tensor("n"),
    iou_threshold=number(0.5, 0.0, 0.25, 0.3, 0.7, 1.0, least=0, most=1),
    idxs=integers("n", 1, 0, 1, dtype=("int64", "int32"), optional=True),
)
def nms(
    boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, idxs: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the indices of the boxes that non-maximum suppression keeps, from the highest score to the lowest.

    In this order a box is kept unless its intersection over union with a box of its class that was kept before is
    above the threshold. A box that is suppressed suppresses none.

    Args:
        boxes: ``[n, 4]`` as ``(x1, y1, x2, y2)``; float16, bfloat16, float32 or float64, any strides. Half types are
            computed in float32. A box without an area, an inverted one and one that is not finite neither suppress a
            box nor are suppressed: the quotient is 0, or NaN, which is not above the threshold.
        scores: ``[n]`` of the same dtype. NaN is above all numbers, as torch sorts; of equal scores, -0 and 0 among
            them, the lower index comes first.
        iou_threshold: from 0 to 1.
        idxs: int32 or int64 ``[n]``, the class of each box; boxes of different classes do not suppress one another. All
            are of one class unless given.

    Returns:
        int64 ``[kept]``, indices of boxes, on their device. Its length depends on the data, so that a call on a GPU
        waits for it. There is no gradient.

    Raises:
        TypeError: boxes or scores are no floating-point tensors or differ in dtype, idxs is no int32 or int64 tensor,
            or iou_threshold is no number.
        ValueError: a shape is wrong, devices differ, or iou_threshold is not from 0 to 1.

    Source: torchvision.ops.nms and torchvision.ops.batched_nms.
    """
    order = torch.sort(scores.detach(), stable=True, descending=True).indices
    ranked = boxes.detach()[order].to(torch.promote_types(boxes.dtype, torch.float32))
    by_each = _suppression(ranked, iou_threshold, None if idxs is None else idxs[order])
    kept = torch.ones(len(order), dtype=torch.bool, device=boxes.device)
    # The first boxes are right after as many rounds as they are many, and most often all are after a few.
    while True:
        former, kept = kept, ~(by_each & kept).any(1)
        if torch.equal(former, kept):
            return order[kept]


def _suppression(ranked: torch.Tensor, iou_threshold: float, classes: torch.Tensor | None) -> torch.Tensor:
    """Return whether each box is suppressed by each of higher rank if that is kept: ``[n, n]``."""
    areas = (ranked[:, 2] - ranked[:, 0]) * (ranked[:, 3] - ranked[:, 1])
    coordinates = ranked.T.contiguous()
    places = torch.arange(len(ranked), device=ranked.device)
    found = torch.empty((len(ranked), len(ranked)), dtype=torch.bool, device=ranked.device)
    for begin in range(0, len(ranked), ROWS):
        rows = slice(begin, begin + ROWS)
        x1, y1, x2, y2 = coordinates[:, rows, None]
        width = torch.minimum(x2, coordinates[2]).sub_(torch.maximum(x1, coordinates[0])).clamp_(min=0)
        height = torch.minimum(y2, coordinates[3]).sub_(torch.maximum(y1, coordinates[1])).clamp_(min=0)
        intersection = width.mul_(height)
        above = intersection / (areas[rows, None] + areas).sub_(intersection) > iou_threshold
        above &= places < places[rows, None]
        if classes is not None:
            above &= classes[rows, None] == classes
        found[rows] = above
    return found
