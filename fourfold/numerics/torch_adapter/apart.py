"""Operators that torch computes as a whole, taken apart into operators that have rules."""

from collections.abc import Callable
from typing import Any

import torch

APART: dict[str, Callable[..., Any]] = {}


def apart(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as what operators of aten do, in steps."""

    def register(steps: Callable[..., Any]) -> Callable[..., Any]:
        APART.update({f"aten.{name}": steps for name in names})
        return steps

    return register


@apart("searchsorted.Tensor")
def searchsorted(
    edges: Any, a: Any, *, out_int32: bool = False, right: bool = False, side: Any = None, sorter: Any = None
) -> Any:
    """Count the edges below each number."""
    edges = (edges if sorter is None else edges.gather(-1, sorter)).unsqueeze(-2)
    after = side == "right" if side else right
    below = edges <= a.unsqueeze(-1) if after else edges < a.unsqueeze(-1)
    return below.sum(-1).to(torch.int32 if out_int32 else torch.int64)


@apart("bucketize.Tensor")
def bucketize(a: Any, edges: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """Count the edges below each number."""
    return searchsorted(edges, a.reshape(-1), out_int32=out_int32, right=right).reshape(a.shape)


@apart("bincount.default")
def bincount(a: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Sum the weights of each integer."""
    size = max(minlength, int(a.max()) + 1 if a.numel() else 0)
    return weights.new_zeros(size).index_add(0, a, weights)


@apart("index_reduce.default")
def index_reduce(a: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    """Reduce the slices of the source at each index."""
    shape = [-1 if axis == dim % a.ndim else 1 for axis in range(a.ndim)]
    places = index.reshape(shape).expand(source.shape)
    return a.scatter_reduce(dim, places, source, reduce, include_self=include_self)


@apart("masked_scatter_backward.default")
def masked_scatter_backward(grad: Any, mask: Any, sizes: Any) -> Any:
    """Return the gradients of the elements that were scattered, and zeros for the others."""
    taken = grad.masked_select(mask.expand(grad.shape))
    rest = taken.new_zeros(torch.Size(sizes).numel() - taken.numel())
    return torch.cat([taken, rest]).reshape(sizes)


@apart("signbit.default")
def signbit(a: Any) -> Any:
    """Return whether the sign of each number is negative, that of 0 too."""
    return torch.copysign(torch.ones_like(a), a) < 0


@apart("linalg_solve_triangular.default")
def solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """Substitute row by row."""
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    rows: list[Any] = [None] * a.shape[-1]
    order = range(len(rows))
    for done, i in enumerate(reversed(order) if upper else order):
        known = order[len(rows) - done :] if upper else order[:done]
        rest = b[..., i, :]
        if known:
            coefficients = a[..., i, known[0] : known[-1] + 1].unsqueeze(-2)
            rest = rest - (coefficients @ torch.stack([rows[j] for j in known], -2)).squeeze(-2)
        rows[i] = rest if unitriangular else rest / a[..., i, i].unsqueeze(-1)
    return torch.stack(rows, -2) if rows else b


@apart("_embedding_bag.default", "_embedding_bag_forward_only.default")
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
    kept = index != padding
    rows = table.index_select(0, index[kept])
    rows = rows if weights is None else rows * weights[kept].unsqueeze(-1)
    result = table.new_zeros(len(starts), table.shape[1]).index_add(0, bag[kept], rows)
    count = torch.bincount(bag[kept], minlength=len(starts))
    result = result / count.clamp(min=1).unsqueeze(-1) if mode == MEAN else result
    return result, bag, count, torch.zeros_like(count)


SUM, MEAN = 0, 1


@apart("_embedding_bag_backward.default")
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
    kept = index != padding
    return grad.new_zeros(rows, grad.shape[1]).index_add(0, index[kept], share[kept])


@apart("_embedding_bag_per_sample_weights_backward.default")
def embedding_bag_weights_backward(
    grad: Any, table: Any, index: Any, starts: Any, bag: Any, mode: int, padding: int = -1
) -> Any:
    """Return the product of each row and the gradient of its bag."""
    products = (grad.index_select(0, bag) * table.index_select(0, index)).sum(-1)
    return torch.where(index != padding, products, 0.0)
