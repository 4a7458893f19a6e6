"""Operators that torch computes as a whole, taken apart into operators that have rules."""

from collections.abc import Callable
from typing import Any

import torch

COMPOSITES: dict[str, Callable[..., Any]] = {}


def composite(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as what operators of aten do, in steps."""

    def register(steps: Callable[..., Any]) -> Callable[..., Any]:
        COMPOSITES.update({f"aten.{name}": steps for name in names})
        return steps

    return register


def on_each(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Apply an operator on lists of tensors, as optimizers call them, to the tensors one by one."""
    name = str(func).split(".")[1].removeprefix("_foreach_")
    # torch.maximum takes no numbers.
    alone = name.replace("maximum", "clamp_min").replace("minimum", "clamp_max")
    method = torch.linalg.vector_norm if name == "norm" else getattr(torch.Tensor, alone)
    count = next(len(arg) for arg in args if isinstance(arg, list | tuple))
    results = []
    for i in range(count):
        first, *rest = (arg[i] if isinstance(arg, list | tuple) else arg for arg in args)
        options = {key: arg[i] if isinstance(arg, list | tuple) else arg for key, arg in kwargs.items()}
        if name.startswith("addc") and len(rest) == 3:
            options["value"] = rest.pop()
        results.append(method(first, *rest, **options))
    return None if name.endswith("_") else results


@composite("searchsorted.Tensor")
def searchsorted(
    edges: Any, a: Any, *, out_int32: bool = False, right: bool = False, side: Any = None, sorter: Any = None
) -> Any:
    """Count the edges below each number."""
    edges = (edges if sorter is None else edges.gather(-1, sorter)).unsqueeze(-2)
    from_right = side == "right" if side else right
    is_before = edges <= a.unsqueeze(-1) if from_right else edges < a.unsqueeze(-1)
    return is_before.sum(-1).to(torch.int32 if out_int32 else torch.int64)


@composite("bucketize.Tensor")
def bucketize(a: Any, edges: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """Count the edges below each number."""
    return searchsorted(edges, a.reshape(-1), out_int32=out_int32, right=right).reshape(a.shape)


@composite("bincount.default")
def bincount(a: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Sum the weights of each integer."""
    size = max(minlength, int(a.max()) + 1 if a.numel() else 0)
    return weights.new_zeros(size).index_add(0, a, weights)


@composite("index_reduce.default")
def index_reduce(a: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    """Reduce the slices of the source at each index."""
    shape = [-1 if axis == dim % a.ndim else 1 for axis in range(a.ndim)]
    places = index.reshape(shape).expand(source.shape)
    return a.scatter_reduce(dim, places, source, reduce, include_self=include_self)


@composite("masked_scatter_backward.default")
def masked_scatter_backward(grad: Any, mask: Any, sizes: Any) -> Any:
    """Return the gradients of the elements that were scattered, and zeros for the others."""
    values = grad.masked_select(mask.expand(grad.shape))
    zeros = values.new_zeros(torch.Size(sizes).numel() - values.numel())
    return torch.cat([values, zeros]).reshape(sizes)


@composite("signbit.default")
def signbit(a: Any) -> Any:
    """Return whether the sign of each number is negative, that of 0 too."""
    return torch.copysign(torch.ones_like(a), a) < 0


@composite("linalg_solve_triangular.default")
def solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """Substitute row by row."""
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    rows: list[Any] = [None] * a.shape[-1]
    order = range(len(rows))
    for count, i in enumerate(reversed(order) if upper else order):
        solved = order[len(rows) - count :] if upper else order[:count]
        right_side = b[..., i, :]
        if solved:
            coefficients = a[..., i, solved[0] : solved[-1] + 1].unsqueeze(-2)
            right_side = right_side - (coefficients @ torch.stack([rows[j] for j in solved], -2)).squeeze(-2)
        rows[i] = right_side if unitriangular else right_side / a[..., i, i].unsqueeze(-1)
    return torch.stack(rows, -2) if rows else b


@composite("_embedding_bag.default", "_embedding_bag_forward_only.default")
def embedding_bag(
    table: Any,
    index: Any,
    starts: Any,
    by_frequency: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: Any = None,
    include_last_offset: bool = False,
    padding: int = -1,
) -> Any:
    """Sum or average the rows of each bag; return also the bag of each index, and each bag's number of rows."""
    if mode not in (SUM, MEAN):
        return NotImplemented
    starts = starts[: len(starts) - include_last_offset]
    bag = searchsorted(starts, torch.arange(len(index)), right=True) - 1
    is_counted = index != padding
    rows = table.index_select(0, index[is_counted])
    rows = rows if weights is None else rows * weights[is_counted].unsqueeze(-1)
    result = table.new_zeros(len(starts), table.shape[1]).index_add(0, bag[is_counted], rows)
    count = torch.bincount(bag[is_counted], minlength=len(starts))
    result = result / count.clamp(min=1).unsqueeze(-1) if mode == MEAN else result
    return result, bag, count, torch.zeros_like(count)


SUM, MEAN = 0, 1


@composite("_embedding_bag_backward.default")
def embedding_bag_backward(
    grad: Any,
    index: Any,
    starts: Any,
    bag: Any,
    count: Any,
    largest: Any,
    rows: int,
    by_frequency: bool,
    mode: int,
    sparse: bool,
    weights: Any,
    padding: int = -1,
) -> Any:
    """Add the gradient of each bag to its rows."""
    if by_frequency:
        return NotImplemented
    share = grad / count.clamp(min=1).unsqueeze(-1) if mode == MEAN else grad
    share = share.index_select(0, bag)
    share = share if weights is None else share * weights.unsqueeze(-1)
    is_counted = index != padding
    return grad.new_zeros(rows, grad.shape[1]).index_add(0, index[is_counted], share[is_counted])


@composite("_embedding_bag_per_sample_weights_backward.default")
def embedding_bag_weights_backward(
    grad: Any, table: Any, index: Any, starts: Any, bag: Any, mode: int, padding: int = -1
) -> Any:
    """Return the product of each row and the gradient of its bag."""
    products = (grad.index_select(0, bag) * table.index_select(0, index)).sum(-1)
    return torch.where(index != padding, products, 0.0)


@composite("addbmm.default")
def addbmm(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Add the sum of products of matrices."""
    return torch.add(bias if beta == 1 else beta * bias, (a @ b).sum(0), alpha=alpha)


@composite("_trilinear.default")
def trilinear(a: Any, b: Any, c: Any, of_a: Any, of_b: Any, of_c: Any, summed: Any, unroll_dim: int = 1) -> Any:
    """Sum the products of three tensors along axes, each with axes of length 1 inserted."""
    for axis in range(a.ndim + len(of_a)):
        a, b, c = (x.unsqueeze(axis) if axis in new else x for x, new in ((a, of_a), (b, of_b), (c, of_c)))
    product = a * b * c
    return product.sum(summed) if summed else product


@composite("angle.default")
def angle(a: Any) -> Any:
    """Return pi for numbers below 0, else 0."""
    return torch.where(a.isnan(), a, torch.where(a < 0, torch.pi, 0.0))


@composite("_weight_norm_interface_backward.default")
def weight_norm_backward(grad: Any, v: Any, g: Any, norms: Any, dim: int) -> Any:
    """Return the gradients of the direction and of the length."""
    other_axes = [axis for axis in range(v.ndim) if axis != dim % v.ndim]
    projection = (grad * v).sum(other_axes, keepdim=True) / norms
    return g / norms * (grad - v * (projection / norms)), projection


@composite("histc.default")
def histc(a: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Count the numbers in each of equal parts of a range; the last part has its end."""
    if min == max:
        return NotImplemented
    place = ((a.reshape(-1, 1) - min) * (bins / (max - min))).to(a.dtype)
    start = torch.arange(bins)
    inside = (place >= start) & ((place < start + 1) | ((start == bins - 1) & (place <= bins)))
    return inside.sum(0).to(a.dtype)


@composite("segment_reduce.default")
def segment_reduce(
    a: Any,
    reduce: str,
    *,
    lengths: Any = None,
    indices: Any = None,
    offsets: Any = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Any:
    """Reduce the rows of each segment."""
    counts = lengths if lengths is not None else offsets.diff() if offsets is not None else None
    if counts is None or counts.ndim != 1 or axis or (initial is not None and reduce == "mean"):
        return NotImplemented
    start, reduction = EMPTY_SEGMENTS[reduce]
    result = a.new_full((len(counts), *a.shape[1:]), start if initial is None else initial)
    segment = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return result.index_reduce(0, segment, a, reduction, include_self=reduce != "mean")


@composite("_segment_reduce_backward.default")
def segment_reduce_backward(
    grad: Any,
    output: Any,
    a: Any,
    reduce: str,
    *,
    lengths: Any = None,
    offsets: Any = None,
    axis: int = 0,
    initial: Any = None,
) -> Any:
    """Return the gradients of the rows: those of equal extremes share one."""
    counts = lengths if lengths is not None else offsets.diff()
    if reduce == "prod" or initial is not None:
        return NotImplemented
    segment = torch.repeat_interleave(torch.arange(len(counts)), counts)
    if reduce == "mean":
        grad = grad / counts.reshape(-1, *[1] * (a.ndim - 1))
    if reduce in ("sum", "mean"):
        return grad.index_select(0, segment)
    is_extreme = a == output.index_select(0, segment)
    shares = torch.zeros_like(output).index_add(0, segment, is_extreme.to(a.dtype))
    return torch.where(is_extreme, (grad / shares.clamp(min=1)).index_select(0, segment), 0.0)


# What a segment without rows is reduced to, and the name of the reduction elsewhere.
EMPTY_SEGMENTS = {
    "sum": (0.0, "sum"),
    "mean": (torch.nan, "mean"),
    "prod": (1.0, "prod"),
    "max": (-torch.inf, "amax"),
    "min": (torch.inf, "amin"),
}


@composite("grid_sampler_2d_backward.default")
def grid_sampler_backward(grad: Any, a: Any, grid: Any, mode: int, padding: int, corners: bool, mask: Any) -> Any:
    """Return the gradients of an image and of the places where it was sampled."""
    if mode == BICUBIC or padding == REFLECTED:
        return NotImplemented
    sizes = (a.shape[-1], a.shape[-2])
    steps = [(size - 1) / 2 if corners else size / 2 for size in sizes]
    places = [(grid[..., i] + 1) * step - (0.0 if corners else 0.5) for i, step in enumerate(steps)]
    if padding == BORDER:
        inner = [(place > 0) & (place < size - 1) for place, size in zip(places, sizes)]
        slopes = [torch.where(inside, step, 0.0) for inside, step in zip(inner, steps)]
        places = [place.clamp(0, size - 1) for place, size in zip(places, sizes)]
    else:
        slopes = [torch.full_like(place, step) for place, step in zip(places, steps)]
    starts = [place.round() if mode == NEAREST else place.floor() for place in places]
    flat, image = grad.flatten(2), a.flatten(2)
    to_image = image.new_zeros(image.shape)
    to_grid = [torch.zeros_like(place) for place in places]
    for x, y in ((0, 0),) if mode == NEAREST else ((0, 0), (0, 1), (1, 0), (1, 1)):
        column, row = (start.to(torch.int64) + step for start, step in zip(starts, (x, y)))
        inside = (column >= 0) & (column < sizes[0]) & (row >= 0) & (row < sizes[1])
        number = torch.where(inside, row * sizes[0] + column, 0).flatten(1)[:, None]
        number = number.expand(-1, image.shape[1], -1)
        near = [1.0 if mode == NEAREST else 1 - abs(p - s) for p, s in zip(places, (column, row))]
        share = torch.where(inside, near[0] * near[1], 0.0).flatten(1)[:, None]
        to_image = to_image.scatter_add(2, number, flat * share)
        if mode != NEAREST:
            product = torch.where(inside, (flat * image.gather(2, number)).sum(1).reshape(inside.shape), 0.0)
            to_grid[0] = to_grid[0] + (2 * x - 1) * product * near[1]
            to_grid[1] = to_grid[1] + (2 * y - 1) * product * near[0]
    slopes_of_grid = torch.stack([part * slope for part, slope in zip(to_grid, slopes)], -1)
    return to_image.reshape(a.shape), slopes_of_grid


NEAREST, BICUBIC = 1, 2
BORDER, REFLECTED = 1, 2


@composite("linalg_cholesky_ex.default")
def cholesky(a: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    """Factor column by column."""
    a = a.mT if upper else a
    columns: list[Any] = []
    for i in range(a.shape[-1]):
        remainder = a[..., i:, i]
        if columns:
            factors = torch.stack(columns, -1)
            remainder = remainder - (factors[..., i:, :] @ factors[..., i, :, None])[..., 0]
        column = torch.cat([remainder[..., :1].sqrt(), remainder[..., 1:] / remainder[..., :1].sqrt()], -1)
        columns.append(torch.nn.functional.pad(column, (i, 0)))
    result = torch.stack(columns, -1) if columns else a
    return (result.mT if upper else result), torch.zeros(a.shape[:-2], dtype=torch.int32)


@composite("cholesky_solve.default")
def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    """Substitute by the factor and by its transpose."""
    lower = factor.mT if upper else factor
    return solve_triangular(lower.mT, solve_triangular(lower, b, upper=False), upper=True)
