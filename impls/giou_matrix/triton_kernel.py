"""giou_matrix in Triton: one launch forward; one backward, and one for each gradient that adds the tiles' sums."""

from typing import Any

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv
from fourfold.backends.triton import launch as triton_launch

from ..giou.triton_boxes import giou_of, grad_of_areas, grad_of_box, load_boxes, store_boxes
from .operators import leaves_lanes_idle, register

# Rows and columns of a tile. A pair takes some 40 registers, so that a thread has four at once.
TILE = 32, 32
PAIRS = 512  # of a program without a tile
REDUCED = 64


@triton.jit
def load_tile(boxes_a_ptr, boxes_b_ptr, n, m, COMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return rows and columns of the program's tile, and the coordinates of their boxes, to be broadcast."""
    across = tl.cdiv(m, COLUMNS)
    down = tl.program_id(0) // across
    rows = down.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) - down * across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    ax1, ay1, ax2, ay2 = load_boxes(boxes_a_ptr, rows, rows, 1, rows < n, COMPUTE, True)
    bx1, by1, bx2, by2 = load_boxes(boxes_b_ptr, columns, columns, 1, columns < m, COMPUTE, True)
    a = (ax1[:, None], ay1[:, None], ax2[:, None], ay2[:, None])
    b = (bx1[None, :], by1[None, :], bx2[None, :], by2[None, :])
    return rows, columns, a, b


@triton.jit
def giou_matrix_forward_kernel(
    boxes_a_ptr,  # [n, 4]
    boxes_b_ptr,  # [m, 4]
    scores_ptr,  # [n, m]
    n,
    m,
    eps: tl.float64,  # else Triton rounds it to float32
    ENCLOSED: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # One program owns a tile of ROWS rows and COLUMNS columns.
    rows, columns, a, b = load_tile(boxes_a_ptr, boxes_b_ptr, n, m, COMPUTE, ROWS, COLUMNS)
    eps = tl.full((), eps, COMPUTE)
    score = giou_of(a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], eps, ENCLOSED)
    at = rows[:, None] * m + columns[None, :]
    mask = (rows < n)[:, None] & (columns < m)[None, :]
    tl.store(scores_ptr + at, score.to(scores_ptr.dtype.element_ty), mask=mask)


@triton.jit
def giou_matrix_pairs_kernel(
    boxes_a_ptr,  # [n, 4]
    boxes_b_ptr,  # [m, 4]
    scores_ptr,  # [n, m]
    n,
    m,
    eps: tl.float64,
    ENCLOSED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    PAIRS: tl.constexpr,
):
    # One program owns PAIRS consecutive scores.
    at = tl.program_id(0).to(INDEX) * PAIRS + tl.arange(0, PAIRS)
    rows = at // m
    columns = at - rows * m
    inside = rows < n
    ax1, ay1, ax2, ay2 = load_boxes(boxes_a_ptr, rows, rows, 1, inside, COMPUTE, True)
    bx1, by1, bx2, by2 = load_boxes(boxes_b_ptr, columns, columns, 1, inside, COMPUTE, True)
    score = giou_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, tl.full((), eps, COMPUTE), ENCLOSED)
    tl.store(scores_ptr + at.to(tl.int64), score.to(scores_ptr.dtype.element_ty), mask=inside)


@triton.jit
def giou_matrix_backward_kernel(
    grad_output_ptr,  # [n, m], strided
    boxes_a_ptr,  # [n, 4]
    boxes_b_ptr,  # [m, 4]
    sums_a_ptr,  # [ceil(m / COLUMNS), n, 4]
    sums_b_ptr,  # [ceil(n / ROWS), m, 4]
    n,
    m,
    row_stride,
    column_stride,
    eps: tl.float64,
    NEEDS_A: tl.constexpr,
    NEEDS_B: tl.constexpr,
    ENCLOSED: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # One program owns a tile of ROWS rows and COLUMNS columns.
    rows, columns, a, b = load_tile(boxes_a_ptr, boxes_b_ptr, n, m, COMPUTE, ROWS, COLUMNS)
    eps = tl.full((), eps, COMPUTE)
    at = rows[:, None] * row_stride + columns[None, :] * column_stride
    mask = (rows < n)[:, None] & (columns < m)[None, :]
    grad = tl.load(grad_output_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    union, width, height, hull_width, hull_height = grad_of_areas(
        grad, a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], eps, ENCLOSED
    )
    if NEEDS_A:
        x1, y1, x2, y2 = grad_of_box(
            a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], union, width, height, hull_width, hull_height
        )
        to = (tl.program_id(0) % tl.cdiv(m, COLUMNS)).to(tl.int64) * n + rows
        store_boxes(
            sums_a_ptr, to, over(x1, mask, 1), over(y1, mask, 1), over(x2, mask, 1), over(y2, mask, 1), rows < n
        )
    if NEEDS_B:
        x1, y1, x2, y2 = grad_of_box(
            b[0], b[1], b[2], b[3], a[0], a[1], a[2], a[3], union, width, height, hull_width, hull_height
        )
        to = (tl.program_id(0) // tl.cdiv(m, COLUMNS)).to(tl.int64) * m + columns
        inside = columns < m
        store_boxes(sums_b_ptr, to, over(x1, mask, 0), over(y1, mask, 0), over(x2, mask, 0), over(y2, mask, 0), inside)


@triton.jit
def over(gradients, mask, AXIS: tl.constexpr):
    """Sum the gradients of pairs over an axis of the tile. Past the tensors a gradient may be NaN: of a NaN and 0."""
    return tl.sum(tl.where(mask, gradients, 0.0), axis=AXIS)


@triton.jit
def giou_matrix_reduce_kernel(
    sums_ptr,  # [count, n]
    gradient_ptr,  # [n]
    count,
    n,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # One program owns COLUMNS elements of the gradient.
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), COMPUTE)
    for start in range(0, count, ROWS):
        rows = start + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * n + columns[None, :]
        total += tl.load(sums_ptr + at, mask=(rows < count)[:, None] & (columns < n)[None, :], other=0.0)
    gradient = tl.sum(total, axis=0).to(gradient_ptr.dtype.element_ty)
    tl.store(gradient_ptr + columns, gradient, mask=columns < n)


def _options(boxes: torch.Tensor) -> dict[str, Any]:
    return {"COMPUTE": triton_launch.COMPUTE[boxes.dtype], "ROWS": TILE[0], "COLUMNS": TILE[1], "num_warps": 8}


def _forward(scores: torch.Tensor, a: torch.Tensor, b: torch.Tensor, tiles: Any, enclosed: bool, eps: float) -> None:
    (n, m), tensors = scores.shape, (a, b, scores)
    if leaves_lanes_idle(m):
        index = triton_launch.index_type(n * m + PAIRS)
        options = {"ENCLOSED": enclosed, "COMPUTE": triton_launch.COMPUTE[a.dtype], "INDEX": index, "PAIRS": PAIRS}
        triton_launch.launch(giou_matrix_pairs_kernel, (cdiv(n * m, PAIRS),), tensors, (n, m, eps), **options)
        return
    options = {"ENCLOSED": enclosed, **_options(a)}
    triton_launch.launch(giou_matrix_forward_kernel, (tiles[0] * tiles[1],), tensors, (n, m, eps), **options)


def _backward(
    grad_output: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sums_a: Any, sums_b: Any, tiles: Any, *how: Any
) -> None:
    enclosed, eps = how
    tensors = (grad_output, a, b, *(b if sums is None else sums for sums in (sums_a, sums_b)))
    needs = {"NEEDS_A": sums_a is not None, "NEEDS_B": sums_b is not None, "ENCLOSED": enclosed}
    numbers = (a.shape[0], b.shape[0], *grad_output.stride(), eps)
    grid = (tiles[0] * tiles[1],)
    triton_launch.launch(giou_matrix_backward_kernel, grid, tensors, numbers, **needs, **_options(a))


def _reduce(sums: torch.Tensor, gradient: torch.Tensor) -> None:
    n = gradient.numel()
    options = {"COMPUTE": triton_launch.COMPUTE[sums.dtype], "ROWS": 32, "COLUMNS": REDUCED}
    grid = (cdiv(n, REDUCED),)
    triton_launch.launch(giou_matrix_reduce_kernel, grid, (sums, gradient), (sums.shape[0], n), **options)


giou_matrix = register("triton", lambda a, b: TILE, _forward, _backward, _reduce)
