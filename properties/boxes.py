"""Hypothesis strategies for boxes: their numbers, their relative positions, and special values in them."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from fourfold.inputs.arrays import GENERATORS, sizes
from fourfold.numerics.dtypes import DType

PAIRS = (
    "overlapping",
    "disjoint_along_x",
    "disjoint_along_y",
    "disjoint_along_both",
    "touching_edges",
    "touching_corners",
    "nested",
    "identical",
    "sharing_edges",
    "points_and_lines",
    "inverted",
    "pixels",
    "huge",
    "tiny",
)


def _magnitude(dtype: DType, kind: str) -> float:
    # The areas of huge boxes are still finite in the arithmetic. Those of tiny boxes fall below every usual eps.
    if kind == "huge":
        return min(dtype.largest / 32, float(np.sqrt(dtype.arithmetic.largest)) / 16)
    if kind == "tiny":
        return max(dtype.smallest_subnormal * 64, float(np.sqrt(dtype.arithmetic.smallest_normal)) / 64)
    return 1.0


def box_pairs(
    rng: np.random.Generator, count: int, kinds: Sequence[str], dtype: DType, origin: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Draw pairs of boxes ``[count, 4]`` of the given kinds, rounded. Lower corners lie up to 8 past `origin`."""
    corner = rng.uniform(origin, origin + 8, (2, count, 2))
    size = rng.uniform(0.125, 4, (2, count, 2))
    kind = rng.choice(np.array(kinds), count)
    first, second = np.concatenate([corner, corner + size], -1)

    def of(*names: str) -> np.ndarray:
        return np.isin(kind, names)

    near = of("overlapping")
    second[near] = first[near] + rng.uniform(-0.3, 0.3, (int(near.sum()), 4)) * np.tile(size[0][near], 2) / 2
    for axis, name in enumerate(("disjoint_along_x", "disjoint_along_y")):
        apart = of(name, "disjoint_along_both")
        shift = first[apart, axis + 2] + rng.uniform(0.125, 2, int(apart.sum())) - second[apart, axis]
        second[apart, axis] += shift
        second[apart, axis + 2] += shift
    touch = of("touching_edges", "touching_corners")
    second[touch, 0] = first[touch, 2]
    second[touch, 2] = first[touch, 2] + size[1][touch, 0]
    edges = of("touching_edges")
    # They overlap along y by at least half of the smaller height, so that edges touch and do not only lie on one line.
    second[edges, 1] = first[edges, 1] + rng.uniform(-0.5, 0.5, int(edges.sum())) * size[:, edges, 1].min(axis=0)
    second[edges, 3] = second[edges, 1] + size[1][edges, 1]
    across = edges & (rng.random(count) < 0.5)
    for box in (first, second):
        box[across] = box[across][:, [1, 0, 3, 2]]
    corners = of("touching_corners")
    second[corners, 1] = first[corners, 3]
    second[corners, 3] = first[corners, 3] + size[1][corners, 1]
    nested = of("nested")
    second[nested, :2] = first[nested, :2] + 0.25 * size[0][nested]
    second[nested, 2:] = first[nested, 2:] - 0.25 * size[0][nested]
    same = of("identical")
    second[same] = first[same]
    shared = of("sharing_edges")
    # Share only edges that leave the box upright. Where the random choice has none of them, share all.
    upright = np.concatenate([second[:, 2:] > first[:, :2], second[:, :2] < first[:, 2:]], -1)
    keep = upright & (rng.random((count, 4)) < 0.5)
    keep |= upright & ~keep.any(-1, keepdims=True)
    second[shared] = np.where(keep[shared], first[shared], second[shared])
    flat = of("points_and_lines")
    collapse = rng.random((2, count, 2)) < 0.6
    collapse[0] |= ~np.logical_or.reduce(collapse, axis=(0, 2), keepdims=True)[0]
    for box, which in zip((first, second), collapse):
        box[flat, 2:] = np.where(which[flat], box[flat, :2], box[flat, 2:])
    inverted = of("inverted")
    first[inverted] = first[inverted][:, [2, 1, 0, 3]]
    second[inverted] = second[inverted][:, [0, 3, 2, 1]]
    pixels = of("pixels")
    first[pixels] = np.rint(first[pixels] * 25)
    second[pixels] = np.rint(second[pixels] * 25)
    for name in ("huge", "tiny"):
        scaled = of(name)
        first[scaled] *= _magnitude(dtype, name)
        second[scaled] *= _magnitude(dtype, name)
    swap = rng.random(count) < 0.5
    first[swap], second[swap] = second[swap].copy(), first[swap].copy()
    return first.astype(dtype.numpy), second.astype(dtype.numpy)


@st.composite
def bulk_pairs(draw: st.DrawFn, dtype: DType, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` pairs made from a seed, of one kind or of all kinds mixed, half of the time on both sides of 0."""
    kinds = draw(st.one_of(st.sampled_from(PAIRS).map(lambda kind: (kind,)), st.just(PAIRS)))
    origin = draw(st.sampled_from((0.0, -6.0)))
    # True comes first, because a counterexample shrinks to the first choice.
    whole = draw(st.sampled_from((True, False, False, False)))
    rng = draw(GENERATORS)
    boxes1, boxes2 = box_pairs(rng, count, kinds, dtype, origin)
    return (np.rint(boxes1), np.rint(boxes2)) if whole else (boxes1, boxes2)


@st.composite
def explicit_pairs(draw: st.DrawFn, dtype: DType, count: int, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` or at most `most` pairs by coordinates: a counterexample shrinks to small whole numbers.

    To draw their number as a list's length lets Hypothesis delete a pair in one step.
    """
    # Whole numbers and halves up to 12 are exact in every dtype, and make many ties and degenerate boxes.
    coordinate = st.one_of(st.integers(0, 12), st.integers(-24, 24).map(lambda half: half / 2))
    corner = st.tuples(coordinate, coordinate)
    size = st.tuples(st.integers(1, 12), st.integers(1, 12))
    proper = st.tuples(corner, size).map(lambda b: (b[0][0], b[0][1], b[0][0] + b[1][0], b[0][1] + b[1][1]))
    box = st.one_of(proper, proper, st.tuples(coordinate, coordinate, coordinate, coordinate))
    flat = draw(st.lists(st.tuples(box, box), min_size=count, max_size=most or count))
    pairs = np.array(flat, dtype=np.float64).reshape(-1, 2, 4)
    return pairs[:, 0].astype(dtype.numpy), pairs[:, 1].astype(dtype.numpy)


def pairs(dtype: DType, count: int) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    """Return `count` pairs of boxes: drawn one by one if they are few, else made from a seed."""
    if count <= 2:
        return explicit_pairs(dtype, count)
    if count <= 4:
        return st.one_of(explicit_pairs(dtype, count), bulk_pairs(dtype, count))
    return bulk_pairs(dtype, count)


@st.composite
def batches(draw: st.DrawFn, rows: int) -> tuple[int, int]:
    """Draw the number of boxes of each sample, at most `rows` in all: sometimes one long sample, rarely no box."""
    kind = draw(st.sampled_from((*["any"] * 8, *["one_long"] * 3, "empty")))
    # Every kind draws the same numbers, so that a counterexample can shrink from one kind to another.
    first, second, swapped = draw(sizes(rows)), draw(sizes(rows)), draw(st.booleans())
    if kind == "one_long":
        return 1, min(1 + 3 * rows // 4 + first, rows)
    first = max(first, 1)
    second = 0 if kind == "empty" else min(max(second, 1), rows // first)
    return (second, first) if swapped else (first, second)


@st.composite
def box_counts(draw: st.DrawFn, batch: int, max_boxes: int) -> np.ndarray:
    """Return the number of boxes in each of `batch` images: as in a face-detection dataset, or extreme."""
    kind = draw(st.sampled_from(("full", "uniform", "few", "one_full", "full", "uniform", "few", "single", "none")))
    rng = draw(GENERATORS)
    counts = np.zeros(batch, dtype=np.int64)
    if kind == "few":  # floor(|N(0, 3)|): most images hold fewer than five
        counts = np.floor(np.abs(rng.normal(0, 3, batch))).astype(np.int64)
    elif kind == "one_full" and batch:
        counts[rng.integers(batch)] = max_boxes
    elif kind == "full":
        counts[:] = max_boxes
    elif kind == "uniform":
        counts = rng.integers(0, max_boxes + 1, batch)
    elif kind == "single" and batch:
        counts[rng.integers(batch)] = 1
    return np.clip(counts, 0, max_boxes)


def pairs_without_ties(rng: np.random.Generator, count: int, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` pairs of upright boxes, no two x or y of a pair closer than 1/8: far from ties and clamps."""
    places = rng.permuted(np.tile(np.arange(16.0), (count, 1)), axis=-1)[:, :8].reshape(count, 4, 2)
    edges = np.sort(places, axis=-1) / 4 + rng.uniform(0, 1 / 8, (count, 4, 2))
    x1, x2, y1, y2 = edges[:, :2, 0], edges[:, :2, 1], edges[:, 2:, 0], edges[:, 2:, 1]
    boxes = np.stack([x1, y1, x2, y2], axis=-1).astype(dtype.numpy)
    return boxes[:, 0], boxes[:, 1]


def pairs_of_one_aspect(rng: np.random.Generator, count: int, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` pairs of upright boxes without ties whose sides have one ratio; some overlap."""
    size, corner = rng.uniform(1, 2, (count, 2)), rng.uniform(0, 2, (count, 2))
    ratio = rng.uniform(0.5, 0.7, (count, 1))
    # The smaller box begins inside and ends inside, begins inside and ends past the larger one, or begins past it.
    begin = corner + size * (rng.choice([0.1, 0.7, 1.1], (count, 2)) + rng.uniform(0, 0.1, (count, 2)))
    larger, smaller = np.concatenate([corner, corner + size], -1), np.concatenate([begin, begin + ratio * size], -1)
    swap = rng.random((count, 1)) < 0.5
    first, second = np.where(swap, smaller, larger), np.where(swap, larger, smaller)
    return first.astype(dtype.numpy), second.astype(dtype.numpy)
