"""nms: the reference."""

from typing import Any

import numpy as np

Array = Any


def intersection_and_union(boxes1: Array, boxes2: Array) -> tuple[Array, Array]:
    """Return areas of the intersection, with sides of at least 0, and of the union, of broadcast boxes."""
    width = np.minimum(boxes1[..., 2], boxes2[..., 2]) - np.maximum(boxes1[..., 0], boxes2[..., 0])
    height = np.minimum(boxes1[..., 3], boxes2[..., 3]) - np.maximum(boxes1[..., 1], boxes2[..., 1])
    intersection = np.maximum(width, 0.0) * np.maximum(height, 0.0)
    area1, area2 = ((boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1]) for boxes in (boxes1, boxes2))
    return intersection, area1 + area2 - intersection


def order(scores: np.ndarray) -> np.ndarray:
    """Return the places of scores from high to low: NaN first, and of equal scores the lower place first."""
    return np.lexsort((-scores, ~np.isnan(scores)))


def forward(boxes: np.ndarray, scores: np.ndarray, iou_threshold: float, idxs: np.ndarray | None = None) -> np.ndarray:
    """Return the boxes that are kept, from the highest score to the lowest.

    In this order a box is kept unless its intersection over union with a box of its class that was kept before is
    above the threshold. A quotient that is NaN, as 0 / 0 is, is not.

    Args:
        boxes: ``[n, 4]`` as ``(x1, y1, x2, y2)``.
        scores: ``[n]``.
        iou_threshold: from 0 to 1.
        idxs: ``[n]``, the class of each box; of one class unless given.

    Returns:
        int64 ``[kept]``, indices of boxes.
    """
    places = order(scores)
    ranked = boxes[places]
    classes = np.zeros(len(places), np.int64) if idxs is None else idxs[places]
    suppressed = np.zeros(len(places), bool)
    with np.errstate(all="ignore"):
        for rank in range(len(places)):
            if not suppressed[rank]:
                intersection, union = intersection_and_union(ranked[rank], ranked[rank + 1 :])
                alike = classes[rank + 1 :] == classes[rank]
                suppressed[rank + 1 :] |= alike & (intersection / union > iou_threshold)
    return places[~suppressed].astype(np.int64)
