"""The rules of torch's operators that order numbers: extremes, sorts, and the indices that they return.

Each ordered number is a monotonic function of all numbers of its row, and moves no farther than they do: it lies
between the numbers at its place in the ordered lower ends and in the ordered upper ends. The indices may depend on
rounding, or be a choice among equal numbers. Autograd puts gradients at these indices, so every number that may stand
at a place may receive its gradient.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fourfold.compat.torch_internals import argument_names
from fourfold.numerics.bounded import Bounded, Comparison, HangsOnRounding
from fourfold.numerics.steps.along_axes import largest, order_statistic, smallest
from fourfold.numerics.torch_adapter.elementwise import axes, comparison_rule, lift_operand
from fourfold.numerics.torch_adapter.moves import move, scatter_add
from fourfold.numerics.torch_adapter.ranking import Ranking
from fourfold.numerics.torch_adapter.tensors import (
    BoundedTensor,
    Evaluation,
    Places,
    SomePlaces,
    ViewedStorage,
    index_places,
    plain,
    whole,
)

Array = np.ndarray


@dataclass(frozen=True)
class Extreme:
    """Link between a maximum or minimum and the memory of its source tensor."""

    memory: ViewedStorage


def amax(a: Any, dim: Any = None, keepdim: bool = False) -> Bounded:
    """Return the largest number along axes."""
    return largest(lift_operand(a), axes(dim), keepdims=keepdim)


def amin(a: Any, dim: Any = None, keepdim: bool = False) -> Bounded:
    """Return the smallest number along axes."""
    return smallest(lift_operand(a), axes(dim), keepdims=keepdim)


def median(a: Any) -> Bounded:
    """Return the median of all numbers, the lower of the two middle ones; NaN if any number is NaN."""

    def middle(part: Array) -> Array:
        flat = np.sort(part, axis=None)
        return flat[-1 if flat.size and np.isnan(flat[-1]) else (flat.size - 1) // 2]

    return order_statistic(middle, lift_operand(a))


@whole("amax.default", "max.default", "amin.default", "min.default", "median.default")
def reduce_extreme(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the largest or smallest number along axes, and link its memory to the source's."""
    a = args[0]
    if not isinstance(a, BoundedTensor) and not a.is_floating_point():
        return func(*args, **kwargs)
    compute = median if "median" in str(func) else amax if "max" in str(func) else amin
    result = evaluation.wrap(compute(evaluation.unwrap(a), *args[1:], **kwargs), a.dtype)
    if isinstance(a, BoundedTensor):
        result.memory.note = Extreme(a.memory)
    return result


@whole("eq.Tensor")
def equal(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return a == b. Autograd compares numbers with the extreme of their row, to share its gradient among them."""
    a, b = args
    for top, row in ((a, b), (b, a)):
        if is_extreme_of(top, row) and evaluation.backward:
            equal_places = rivals(evaluation.unwrap(row), evaluation.unwrap(top))
            return BoundedTensor.of(ViewedStorage(equal_places), equal_places, torch.bool)
    if not any(isinstance(x, BoundedTensor) or x.is_floating_point() for x in args):
        return func(a, b)
    if a is b and index_places(a) is None:  # a test for NaN, as torch's for finite numbers: no tie
        return evaluation.wrap(~np.isnan(lift_operand(evaluation.unwrap(a))), torch.bool)
    return evaluation.wrap(comparison_rule(np.equal, True, False)(*map(evaluation.unwrap, args)), torch.bool)


def is_extreme_of(top: torch.Tensor, row: torch.Tensor) -> bool:
    """Return whether a tensor has the largest or smallest number of another."""
    if not isinstance(top, BoundedTensor) or not isinstance(row, BoundedTensor):
        return False
    note = top.memory.note
    return isinstance(note, Extreme) and note.memory is row.memory and top.ndim in (0, row.ndim)


def rivals(row: Bounded, top: Bounded) -> Comparison:
    """Return which numbers are the extreme of their row: certain where no other number is within rounding."""
    near = abs(row.value - top.value) <= row.error + top.error
    dims = tuple(i for i in range(row.ndim) if not top.ndim or top.shape[i] != row.shape[i])
    is_only = np.sum(near, axis=dims, keepdims=True) == 1
    outcome = row.value == top.value
    exact = (row.error == 0) & outcome & np.all((row.error == 0) | ~near, axis=dims, keepdims=True)
    return Comparison(outcome, near & ~is_only & ~exact, row.arithmetic)


def indices_along(
    evaluation: Evaluation, source: Bounded, index: Array, values: Bounded, axis: int, **order: Any
) -> torch.Tensor:
    """Return indices as a tensor: a plain one if they are the only right ones and gradients hang on no choice.

    Args:
        evaluation: the evaluation that runs.
        source: the numbers.
        index: the indices.
        values: the numbers at the indices.
        axis: the axis.
        **order: how the indices order the numbers: the arguments of `Ranking` after the numbers.
    """
    unique = order.get("stable", False) and not evaluation.contract.ties
    if not source.ndim or not source.size or not (source.error.any() or not unique):
        return torch.from_numpy(np.array(index))
    places = Places(np.array(index, order="C"), source, values, axis)
    rows = places.rows(source.value), places.rows(source.error)
    object.__setattr__(places, "order", Ranking(rows, **order))
    return BoundedTensor.of(ViewedStorage(places), places, torch.int64)


@whole("max.dim", "min.dim", "argmax.default", "argmin.default")
def extreme_along(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the extreme along an axis and its index, or the index alone."""
    a = args[0]
    if not isinstance(a, BoundedTensor):
        return func(*args, **kwargs)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    source, name = lift_operand(evaluation.unwrap(a)), str(func).split(".")[1]
    rows = source.reshape(-1) if dim is None else source
    axis = 0 if dim is None else dim % max(source.ndim, 1)
    if not source.ndim:
        index, values = np.zeros((), np.int64), source
    else:
        find = np.argmax if "max" in name else np.argmin
        index = find(rows.value, axis=axis, keepdims=keepdim and dim is not None)
        values = (amax if "max" in name else amin)(rows, axis, keepdim and dim is not None)
    index = index.reshape((1,) * source.ndim) if dim is None and keepdim else index
    # torch documents the first of equal numbers. NaN is the extreme of its row.
    largest = "max" in name
    order = {"descending": largest, "nan_first": not largest, "stable": True}
    indices = indices_along(evaluation, rows, np.asarray(index, dtype=np.int64), values, axis, **order)
    return indices if name.startswith("arg") else (evaluation.wrap(values, a.dtype), indices)


@whole("sort.default", "sort.stable", "topk.default", "kthvalue.default", "median.dim")
def sort(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the numbers in order and their indices, as torch finds them for the exact numbers."""
    a, *arguments = args
    name = str(func).split(".")[1]
    axis = kwargs.get("dim", next((x for x in arguments[name in ("topk", "kthvalue") :] if type(x) is int), -1))
    if not isinstance(a, BoundedTensor):
        values, index = func(*args, **kwargs)
        if a.is_floating_point() or evaluation.backward:
            return values, index
        # Integers have no error, and equal ones may come in any order unless the sort is stable.
        exact = Bounded.exact(rank(a.numpy()).astype(np.float64), evaluation.dtype.arithmetic)
        axis = axis % max(a.ndim, 1)
        options = order_of(func, exact, arguments, kwargs, axis)
        if options.get("stable"):
            return values, index
        sorted_values = Bounded.exact(values.numpy().astype(np.float64), exact.arithmetic)
        return values, indices_along(evaluation, exact, index.numpy(), sorted_values, axis, **options)
    source = lift_operand(evaluation.unwrap(a))
    ranks = rank(source.value)
    _, index = func(torch.from_numpy(ranks), *arguments, **kwargs)
    axis = axis % max(source.ndim, 1)

    def order(part: Array) -> Array:
        values, _ = func(torch.from_numpy(rank(part)), *arguments, **kwargs)
        result = np.sort(part.reshape(-1))[values.numpy()]
        return np.where(rows_with_nan(part, axis, result.shape), np.nan, result) if name == "median" else result

    if name == "median":
        first = torch.from_numpy(np.isnan(source.value).argmax(axis if source.ndim else None))
        index = torch.where(
            torch.from_numpy(rows_with_nan(source.value, axis, tuple(index.shape))), first.reshape(index.shape), index
        )
    values = order_statistic(order, source)
    options = order_of(func, source, arguments, kwargs, axis)
    return evaluation.wrap(values, a.dtype), indices_along(evaluation, source, index.numpy(), values, axis, **options)


def rows_with_nan(part: Array, axis: int, shape: tuple[int, ...]) -> Array:
    """Return whether each row along an axis has a NaN, which torch's median of it is, in a shape."""
    return np.isnan(part).any(axis if part.ndim else None).reshape(shape)


def order_of(func: Any, source: Bounded, arguments: Sequence[Any], kwargs: dict[str, Any], axis: int) -> dict[str, Any]:
    """Return the arguments of `Ranking` for a function that orders numbers, from the arguments of its call."""
    defaults = {"descending": False, "largest": True, "sorted": True}
    settings = {**defaults, **dict(zip(argument_names(func)[1:], arguments)), **kwargs}
    name = str(func).split(".")[1]
    if name == "topk":
        return {"descending": settings["largest"], "is_sorted": settings["sorted"]}
    if name == "kthvalue":
        return {"first": settings["k"] - 1}
    if name == "median":
        rows = np.moveaxis(source.value, axis, -1).reshape(-1, source.shape[axis]) if source.ndim else source.value
        size = rows.shape[-1] if source.ndim else 1
        return {"first": np.where(np.isnan(rows).any(-1, keepdims=True), size - 1, (size - 1) // 2)}
    return {"descending": settings["descending"], "stable": bool(settings.get("stable"))}


@dataclass(frozen=True, eq=False)
class RunningPlaces(Places):
    """The indices of the running maximum or minimum: several places may have the same number."""

    def rivals(self, with_ties: bool) -> Iterator[Array]:
        """Yield for each row the numbers that may be the extreme at each place: none where it is certain.

        Equal numbers without an error are rivals only `with_ties`.
        """
        parts = (self.source.value, self.source.error, self.values.value, self.values.error)
        for value, error, top, top_error in zip(*map(self.rows, parts)):
            near = abs(value - top[:, None]) <= error + top_error[:, None]
            near |= np.isnan(value) & np.isnan(top)[:, None]
            near &= np.tri(len(value), dtype=bool)
            settled = near.sum(1) == 1
            if not with_ties:
                settled |= ~(near & (error > 0)).any(1) & (top_error == 0)
            yield near & ~settled[:, None]

    def nearest(self, actual: Array) -> Array:
        """Return the right indices nearest to `actual`: at each place any of the numbers that may be the extreme."""
        reported, expected = (self.rows(part) for part in (actual, self.index.astype(actual.dtype)))
        expected = expected.copy()
        for row, near in enumerate(self.rivals(with_ties=True)):
            index = np.where((reported[row] >= 0) & (reported[row] < near.shape[1]), reported[row], 0).astype(np.int64)
            is_rival = near[np.arange(len(index)), index] & (index == reported[row])
            expected[row] = np.where(is_rival, reported[row], expected[row])
        shape = np.moveaxis(self.index, self.axis, -1).shape
        return np.moveaxis(expected.reshape(shape), -1, self.axis)

    def certain(self) -> Array:
        """Return the indices.

        Raises:
            HangsOnRounding: an index depends on rounding.
        """
        if any(near.any() for near in self.rivals(with_ties=False)):
            raise HangsOnRounding("the order of numbers depends on rounding errors, and so do their indices")
        return self.index

    def spread(self, grad: Bounded, with_ties: bool) -> Bounded:
        """Add the gradients of the places at their numbers; a rival receives the gradient of a place, or not."""
        empty = Bounded.exact(np.zeros(self.source.shape, grad.dtype), grad.arithmetic)
        summed = scatter_add(empty, self.axis, self.index, grad)
        reach = self.rows(abs(grad.value) + grad.error)
        with np.errstate(invalid="ignore"):
            free = np.stack([np.where(n, r[:, None], 0).sum(0) for n, r in zip(self.rivals(with_ties), reach)])
        free = np.moveaxis(free.reshape(np.moveaxis(summed.error, self.axis, -1).shape), -1, self.axis)
        return Bounded(summed.value, summed.error + free, grad.arithmetic)


@whole("cummax.default", "cummin.default")
def extreme_so_far(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the running maximum or minimum and its index: the last of equal ones."""
    a, dim = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    if not isinstance(a, BoundedTensor):
        return func(*args, **kwargs)
    source, smallest = lift_operand(evaluation.unwrap(a)), "min" in str(func)
    ranks = np.where(np.isnan(source.value), -1 if smallest else source.size, rank(source.value))
    _, index = func(torch.from_numpy(ranks), dim)
    if not source.size or not source.ndim:
        return evaluation.wrap(source, a.dtype), index
    accumulate = (np.minimum if smallest else np.maximum).accumulate
    axis = dim % source.ndim
    values = order_statistic(lambda part: accumulate(part, axis=axis), source)
    if not (source.error.any() or evaluation.contract.ties):
        return evaluation.wrap(values, a.dtype), index
    places = RunningPlaces(np.array(index.numpy(), order="C"), source, values, axis)
    return evaluation.wrap(values, a.dtype), BoundedTensor.of(ViewedStorage(places), places, torch.int64)


def rank(part: Array) -> Array:
    """Return the rank of each number among all, the same for equal ones: integers, which torch can order."""
    return np.searchsorted(np.sort(part.reshape(-1)), part)


@whole("scatter.src", "scatter_add.default")
def scatter(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Put or add numbers at indices; in a derivative, at indices where numbers were found."""
    a, dim, index, items = args
    places = index_places(index)
    if places is None or isinstance(places, SomePlaces) or not evaluation.backward:
        if func is torch.ops.aten.scatter.src:
            return move(evaluation, func, (a, dim, plain(index), items), kwargs)
        index, operands = evaluation.unwrap(index), (evaluation.unwrap(a), evaluation.unwrap(items))
        return evaluation.wrap(scatter_add(operands[0], dim, index, operands[1]), a.dtype)
    result = places.spread(lift_operand(evaluation.unwrap(items)), evaluation.contract.ties)
    return evaluation.wrap(result, items.dtype)


@whole("gather.default")
def gather(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the numbers at indices: the known values, if the indices were found in the same tensor."""
    a, dim, index = args[:3]
    places = index_places(index)
    if isinstance(places, SomePlaces):
        places = None
    if places is not None and isinstance(a, BoundedTensor) and a.payload is places.source:
        return evaluation.wrap(places.values, a.dtype)
    return move(evaluation, func, (a, dim, plain(index)), {})
