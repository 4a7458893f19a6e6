"""nms in Triton: boxes are put in order, compared 64 with 64, and walked over by one program."""

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv, next_power_of_2
from fourfold.backends.triton import launch as triton_launch

from .operators import BLOCK as WIDTH
from .operators import Work, register

BLOCK = tl.constexpr(WIDTH)  # boxes whose bits make a word
# Boxes that a program puts in order, and that it compares these with at a time.
ORDERED, COMPARED = tl.constexpr(32), tl.constexpr(256)
ROWS = tl.constexpr(16)  # boxes that are compared with BLOCK others at a time
LEAST_WORDS, MOST_WORDS = 8, 128  # of each column, which are looked at together


@triton.jit
def nms_order_kernel(
    boxes_ptr,  # [n, 4], strided
    scores_ptr,  # [n], strided
    idxs_ptr,  # [n], strided; of no meaning without HAS_IDXS
    order_ptr,  # [n]
    ranked_ptr,  # [n, 4]
    classes_ptr,  # [n]; of no meaning without HAS_IDXS
    n,
    box_stride,
    coordinate_stride,
    score_stride,
    idx_stride,
    HAS_IDXS: tl.constexpr,
):
    # One program owns ORDERED boxes. Before each come those of higher scores: NaN is above all numbers, and of equal
    # scores the lower place comes first. Places take 31 bits: of more boxes no memory holds the mask.
    COMPUTE: tl.constexpr = ranked_ptr.dtype.element_ty
    own = tl.program_id(0) * ORDERED + tl.arange(0, ORDERED)
    score = tl.load(scores_ptr + own.to(tl.int64) * score_stride, mask=own < n, other=0.0).to(COMPUTE)
    rank = tl.zeros((ORDERED,), tl.int32)
    for tile in range(tl.cdiv(n, COMPARED)):
        other = tile * COMPARED + tl.arange(0, COMPARED)
        theirs = tl.load(scores_ptr + other.to(tl.int64) * score_stride, mask=other < n, other=0.0).to(COMPUTE)
        is_nan, nan = (theirs != theirs)[None, :], (score != score)[:, None]
        above = (theirs[None, :] > score[:, None]) | (is_nan & (nan == 0))
        alike = (theirs[None, :] == score[:, None]) | (is_nan & nan)
        before = (above | (alike & (other[None, :] < own[:, None]))) & (other < n)[None, :]
        rank += tl.sum(before.to(tl.int32), axis=1)
    tl.store(order_ptr + rank, own.to(tl.int64), mask=own < n)
    coordinate = tl.arange(0, 4)
    at = own.to(tl.int64)[:, None] * box_stride + coordinate[None, :].to(tl.int64) * coordinate_stride
    box = tl.load(boxes_ptr + at, mask=(own < n)[:, None], other=0.0).to(COMPUTE)
    tl.store(ranked_ptr + rank.to(tl.int64)[:, None] * 4 + coordinate[None, :], box, mask=(own < n)[:, None])
    if HAS_IDXS:
        of_class = tl.load(idxs_ptr + own.to(tl.int64) * idx_stride, mask=own < n, other=0).to(tl.int64)
        tl.store(classes_ptr + rank, of_class, mask=own < n)


@triton.jit
def nms_mask_kernel(
    ranked_ptr,  # [n, 4]
    classes_ptr,  # [n]; of no meaning without HAS_IDXS
    mask_ptr,  # [blocks, n]. Bit r of [c, j]: rank BLOCK c + r suppresses rank j.
    n,
    blocks,
    iou_threshold: tl.float64,
    HAS_IDXS: tl.constexpr,
):
    # One program owns the words of BLOCK columns for BLOCK rows, where no row lies past the columns. It takes ROWS rows
    # at a time.
    COMPUTE: tl.constexpr = ranked_ptr.dtype.element_ty
    row_block = tl.program_id(0) // blocks
    column_block = tl.program_id(0) - row_block * blocks
    if row_block <= column_block:
        column = column_block * BLOCK + tl.arange(0, BLOCK)
        column_at = ranked_ptr + column.to(tl.int64) * 4
        other_x1 = tl.load(column_at, mask=column < n, other=0.0)[None, :]
        other_y1 = tl.load(column_at + 1, mask=column < n, other=0.0)[None, :]
        other_x2 = tl.load(column_at + 2, mask=column < n, other=0.0)[None, :]
        other_y2 = tl.load(column_at + 3, mask=column < n, other=0.0)[None, :]
        other_area = (other_x2 - other_x1) * (other_y2 - other_y1)
        threshold = tl.full((), iou_threshold, COMPUTE)
        words = tl.zeros((ROWS, BLOCK), tl.int64)
        for first in range(0, BLOCK, ROWS):
            bit = first + tl.arange(0, ROWS)
            row = row_block * BLOCK + bit
            row_at = ranked_ptr + row.to(tl.int64) * 4
            # A row past the end is of zeros, and suppresses nothing.
            x1 = tl.load(row_at, mask=row < n, other=0.0)[:, None]
            y1 = tl.load(row_at + 1, mask=row < n, other=0.0)[:, None]
            x2 = tl.load(row_at + 2, mask=row < n, other=0.0)[:, None]
            y2 = tl.load(row_at + 3, mask=row < n, other=0.0)[:, None]
            width = tl.minimum(x2, other_x2) - tl.maximum(x1, other_x1)
            height = tl.minimum(y2, other_y2) - tl.maximum(y1, other_y1)
            intersection = tl.maximum(width, 0.0) * tl.maximum(height, 0.0)
            united = (x2 - x1) * (y2 - y1) + other_area - intersection
            # Intersection over union above the threshold, without a division. A union that is NaN or not above 0 has
            # no quotient above it.
            above = (united > 0.0) & (intersection > threshold * united)
            above &= row[:, None] < column[None, :]
            if HAS_IDXS:
                of_row = tl.load(classes_ptr + row, mask=row < n, other=0)
                of_column = tl.load(classes_ptr + column, mask=column < n, other=0)
                above &= of_row[:, None] == of_column[None, :]
            words += above.to(tl.int64) << bit.to(tl.int64)[:, None]
        at = mask_ptr + row_block.to(tl.int64) * n + column
        tl.store(at, tl.sum(words, axis=0), mask=column < n)


@triton.jit
def nms_walk_kernel(
    mask_ptr,  # [blocks, n]
    order_ptr,  # [n]
    words_ptr,  # [blocks]. Bit r of [c]: the box of rank BLOCK c + r is kept.
    kept_ptr,  # [n + 1]
    n,
    blocks,
    WORDS: tl.constexpr,
):
    # One program owns all boxes, and walks over BLOCK columns at a time.
    place = tl.arange(0, BLOCK)
    bit = tl.full((BLOCK,), 1, tl.int64) << place.to(tl.int64)
    count = tl.zeros((), tl.int64)
    for block in range(blocks):
        column = block * BLOCK + place.to(tl.int64)
        within = column < n
        suppressed = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, block, WORDS):
            rows = first + tl.arange(0, WORDS)
            at = mask_ptr + rows.to(tl.int64)[:, None] * n + column[None, :]
            words = tl.load(at, mask=(rows < block)[:, None] & within[None, :], other=0)
            kept = tl.load(words_ptr + rows, mask=rows < block, other=0)
            hit = (words & kept[:, None]) != 0
            suppressed = tl.maximum(suppressed, tl.max(hit.to(tl.int32), axis=0))
        own = tl.load(mask_ptr + column // BLOCK * n + column, mask=within, other=0)
        left = within & (suppressed == 0)
        now = tl.sum(tl.where(left, bit, 0), axis=0)
        former = ~now
        # Each round decides at least one box more for good, from the highest score on.
        while now != former:
            former = now
            now = tl.sum(tl.where(left & ((own & former) == 0), bit, 0), axis=0)
        tl.store(words_ptr + block, now)
        taken = ((now & bit) != 0).to(tl.int32)
        to = count + tl.cumsum(taken, axis=0) - 1
        tl.store(kept_ptr + to, tl.load(order_ptr + column, mask=within, other=0), mask=taken > 0)
        count += tl.sum(taken, axis=0)
        tl.debug_barrier()  # the words are read from memory
    tl.store(kept_ptr + n, count)


def _launch(
    work: Work, boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, idxs: torch.Tensor | None
) -> None:
    n, blocks, has_idxs = boxes.shape[0], work.words.shape[0], idxs is not None
    given = work.order if idxs is None else idxs
    triton_launch.launch(
        nms_order_kernel,
        (cdiv(n, ORDERED.value),),
        (boxes, scores, given, work.order, work.boxes, work.classes),
        (n, *boxes.stride(), scores.stride(0), given.stride(0)),
        HAS_IDXS=has_idxs,
    )
    compared, walked = (work.boxes, work.classes, work.mask), (work.mask, work.order, work.words, work.kept)
    triton_launch.launch(nms_mask_kernel, (blocks**2,), compared, (n, blocks, iou_threshold), HAS_IDXS=has_idxs)
    words = min(max(next_power_of_2(blocks) // 4, LEAST_WORDS), MOST_WORDS)
    triton_launch.launch(nms_walk_kernel, (1,), walked, (n, blocks), WORDS=words, num_warps=min(words // 4, 16))


nms = register("triton", _launch)
