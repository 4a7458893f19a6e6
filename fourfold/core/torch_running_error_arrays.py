"""The rules of torch's operators along axes: sums, extremes, products of matrices, what moves or makes elements."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fourfold.core.running_error import RULES as NUMPY_RULES
from fourfold.core.running_error import Bounded, Comparison, certain, lift
from fourfold.core.running_error_arrays import (
    SEQUENTIAL_TERMS,
    cumsum,
    largest,
    matrix_product,
    mean,
    smallest,
    total,
    var,
)
from fourfold.core.running_error_rules import ROUNDED_ONCE, add, rounded, sqrt, subtract, units
from fourfold.core.torch_running_error_rules import aten, lifted, scaled
from fourfold.core.torch_running_error_tensors import (
    BoundedTensor,
    Evaluation,
    Payload,
    Tied,
    arithmetic,
    as_numpy,
    as_torch,
    current,
    plain,
    strided,
    tensors_in,
    whole,
)

Array = np.ndarray

# Sums and what is made of them.


def axes(dim: Any) -> Any:
    """torch's axes as NumPy's: none, or an empty list, are all."""
    if dim is None or isinstance(dim, int):
        return dim
    return tuple(dim) or None


def count_of_ties(a: Comparison, along: Any, keepdim: bool) -> Bounded:
    """How many are true. In a backward pass, where extremes share a gradient, as few as one of them may count."""
    count = np.sum(a.outcome, axis=along, keepdims=keepdim).astype(np.float64)
    error = np.sum(a.uncertain, axis=along, keepdims=keepdim).astype(np.float64)
    evaluation = current()
    if not evaluation.backward:
        return Bounded(count, error, a.arithmetic)
    least = np.maximum(np.sum(a.outcome & ~a.uncertain, axis=along, keepdims=keepdim), np.minimum(count, 1))
    if evaluation.free_ties:
        error, least = error + np.maximum(count - 1, 0), np.minimum(count, 1)
    return Bounded(count, error, a.arithmetic, np.where(error > 0, np.maximum(least, count - error), count))


@aten("sum.default", "sum.dim_IntList")
def sum_along(a: Any, dim: Any = None, keepdim: bool = False) -> Bounded:
    """The sum in any order that `summation_growth` admits."""
    if isinstance(a, Comparison) or (isinstance(a, np.ndarray) and a.dtype == bool):
        truth = a if isinstance(a, Comparison) else Comparison(a, np.zeros_like(a), arithmetic())
        return count_of_ties(truth, axes(dim), keepdim)
    return total(lifted(a), axes(dim), keepdims=keepdim)


@aten("mean.default", "mean.dim")
def mean_along(a: Any, dim: Any = None, keepdim: bool = False) -> Bounded:
    """The sum divided by the number of its terms."""
    return mean(lifted(a), axes(dim), keepdims=keepdim)


@aten("var.correction")
def variance(a: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Bounded:
    """The mean of the squared deviations, with ``n - correction`` for n."""
    return var(lifted(a), axes(dim), correction=1 if correction is None else correction, keepdims=keepdim)


@aten("var.default", "var.dim")
def unbiased_variance(a: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> Bounded:
    """The variance with n - 1, or n."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return variance(a, dim, correction=int(unbiased), keepdim=keepdim)


@aten("std.correction")
def deviation(a: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Bounded:
    """The square root of the variance."""
    return sqrt(variance(a, dim, correction=correction, keepdim=keepdim))


@aten("var_mean.correction")
def variance_and_mean(a: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple:
    """Both."""
    return variance(a, dim, correction=correction, keepdim=keepdim), mean_along(a, dim, keepdim)


@aten("cumsum.default")
def partial_sums(a: Any, dim: int) -> Bounded:
    """Each partial sum in any order."""
    a = lifted(a)
    return cumsum(a, dim) if a.ndim else a


@aten("prod.default", "prod.dim_int")
def product(a: Any, dim: Any = None, keepdim: bool = False) -> Bounded:
    """The product in any order."""
    return NUMPY_RULES[np.prod].compute(lifted(a), axes(dim), keepdims=keepdim)


@aten("logsumexp.default")
def logsumexp(a: Any, dim: Any, keepdim: bool = False) -> Bounded:
    """m + log(sum(e^(a - m))) with the maximum m, which is left out where it is infinite.

    Any number near the maximum serves as m: its error is left out, for it does not change the result.
    """
    a, along = lifted(a), axes(dim)
    top = largest(a, along, keepdims=True)
    finite = Bounded.exact(np.where(np.isfinite(top.value), top.value, 0), a.arithmetic)
    powers = total(np.exp(subtract(a, finite)), along, keepdims=True)
    powers.limit = np.where(np.isfinite(top.value), np.fmax(powers.least, 1 - units(2) * a.arithmetic.roundoff), 0)
    result = add(finite, np.log(powers))
    return result if keepdim else result.moved(lambda part: np.squeeze(part, along))


@aten("any.default", "any.dim", "any.dims")
def any_along(a: Any, dim: Any = None, keepdim: bool = False) -> Comparison:
    """Whether any is true."""
    return NUMPY_RULES[np.any].compute(lifted_truth(a), axes(dim), keepdims=keepdim)


@aten("all.default", "all.dim", "all.dims")
def all_along(a: Any, dim: Any = None, keepdim: bool = False) -> Comparison:
    """Whether all are true."""
    return NUMPY_RULES[np.all].compute(lifted_truth(a), axes(dim), keepdims=keepdim)


def lifted_truth(a: Any) -> Payload:
    """A comparison as it is, and numbers lifted."""
    return a if isinstance(a, Comparison) else lifted(a)


# Extremes.


@aten("amax.default", "max.default")
def amax(a: Any, dim: Any = None, keepdim: bool = False) -> Bounded:
    """The largest along axes."""
    return largest(lifted(a), axes(dim), keepdims=keepdim)


@aten("amin.default", "min.default")
def amin(a: Any, dim: Any = None, keepdim: bool = False) -> Bounded:
    """The smallest along axes."""
    return smallest(lifted(a), axes(dim), keepdims=keepdim)


# Products of matrices.


@aten("mm.default", "bmm.default", "matmul.default", "mv.default", "dot.default")
def matmul(a: Any, b: Any) -> Bounded:
    """a @ b."""
    return matrix_product(lifted(a), lifted(b))


@aten("addmm.default", "baddbmm.default", "addmv.default")
def addmm(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Bounded:
    """beta bias + alpha a @ b."""
    product = scaled(matmul(a, b), alpha)
    return product if beta == 0 else add(scaled(bias, beta), product)


# What moves elements, or leaves out or repeats some. torch does it with each part of a tensor.

VIEWS = (
    "alias.default as_strided.default detach.default diagonal.default expand.default permute.default select.int"
    " slice.Tensor split.Tensor split_with_sizes.default squeeze.default squeeze.dim squeeze.dims t.default"
    " transpose.int unbind.int unfold.default unsqueeze.default view.default _reshape_alias.default chunk.default"
)
MOVES = (
    "clone.default _unsafe_view.default index_select.default index.Tensor gather.default flip.default roll.default"
    " tril.default triu.default repeat.default cat.default stack.default take.default contiguous.default"
    " lift_fresh.default lift.default rot90.default masked_select.default permute_copy.default"
    " _unsafe_index.Tensor diag_embed.default select_scatter.default slice_scatter.default"
    " diagonal_scatter.default scatter.src index_copy.default copy.default masked_scatter.default"
)
# The places of the arguments whose elements are moved, where it is not the first one alone.
MOVED = {
    "select_scatter.default": (0, 1),
    "slice_scatter.default": (0, 1),
    "diagonal_scatter.default": (0, 1),
    "scatter.src": (0, 3),
    "index_copy.default": (0, 3),
    "copy.default": (0, 1),
    "masked_scatter.default": (0, 2),
}


def parts_of(evaluation: Evaluation, tensors: Sequence[torch.Tensor]) -> tuple[list[list[Array]], Callable]:
    """The arrays of each kind that make several tensors, and what makes a payload of one array of each kind."""
    payloads = [evaluation.given_as_it_is(tensor) for tensor in tensors]
    if all(isinstance(payload, Comparison) for payload in payloads):
        parts = [[p.outcome for p in payloads], [p.uncertain for p in payloads]]
        if len(payloads) == 1 and isinstance(payloads[0], Tied):
            return [*parts, [payloads[0].ties], [payloads[0].kinks]], lambda a, b, *c: Tied(a, b, arithmetic(), *c)
        return parts, lambda a, b: Comparison(a, b, arithmetic())
    numbers = [evaluation.tidy(lift(payload, evaluation.dtype.arithmetic)) for payload in payloads]
    parts = [[n.value for n in numbers], [n.error for n in numbers]]
    if any(number.limit is not None for number in numbers):
        parts.append([evaluation.tidy(Bounded(n.least, n.error, n.arithmetic)).value for n in numbers])
    return parts, lambda value, error, least=None: Bounded(value, error, arithmetic(), least)


def moved_parts(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict, places: Sequence[int]) -> Any:
    """What an operator makes of each part of its arguments at `places`: lists of tensors, and what joins them."""
    movable = [argument for place in places for argument in flat(args[place])]
    kinds, join = parts_of(evaluation, movable)
    results = []
    for arrays in kinds:
        parts = iter(map(as_torch, arrays))
        taken = [
            (
                ([next(parts) for _ in arg] if isinstance(arg, list | tuple) else next(parts))
                if i in places
                else plain(arg)
            )
            for i, arg in enumerate(args)
        ]
        results.append(func(*taken, **kwargs))
    return results, join, movable


def flat(argument: Any) -> Sequence[torch.Tensor]:
    """The tensors of an argument that is one, or a list of them."""
    return argument if isinstance(argument, list | tuple) else [argument]


def unchanged(func: Any, args: tuple, kwargs: dict, places: Sequence[int]) -> Any:
    """The result where nothing among what is moved has an error: torch's own."""
    return func(*map(plain, args), **kwargs)


def has_error(args: tuple, places: Sequence[int]) -> bool:
    """Whether anything that is moved is more than a plain tensor."""
    return any(isinstance(tensor, BoundedTensor) for tensor in tensors_in([args[place] for place in places]))


def view(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A view: it shares its base's memory."""
    if not has_error(args, (0,)):
        return unchanged(func, args, kwargs, (0,))
    base, dtype = args[0], args[0].dtype
    start = int(base.storage_offset())
    if str(func) == "aten.as_strided.default":
        _, shape, strides, *rest = args
        start = int(rest[0]) if rest and rest[0] is not None else start
        part = base.memory.payload.moved(lambda part: strided(part, shape, strides, start))
        return BoundedTensor.of(base.memory, part, dtype, start)
    results, join, _ = moved_parts(evaluation, func, args, kwargs, (0,))

    def one(*parts: torch.Tensor) -> BoundedTensor:
        offset = start + int(parts[0].storage_offset())
        return BoundedTensor.of(base.memory, joined_parts(evaluation, parts, join), dtype, offset)

    return one(*results) if isinstance(results[0], torch.Tensor) else [one(*parts) for parts in zip(*results)]


def joined_parts(evaluation: Evaluation, parts: Sequence[torch.Tensor], join: Callable) -> Payload:
    """A payload of the parts that torch has moved."""
    return join(*(as_numpy(part, np.dtype(evaluation.dtype.wide)) for part in parts))


def move(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Elements elsewhere, in a memory of their own."""
    places = MOVED.get(str(func).removeprefix("aten."), (0,))
    kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    if not has_error(args, places):
        result = unchanged(func, args, kwargs, places)
        if str(func) != "aten.lift_fresh.default" or not result.is_floating_point():
            return result
        args = (result,)
    results, join, movable = moved_parts(evaluation, func, args, kwargs, places)
    dtype = movable[0].dtype if len(places) > 1 else dtype_of_all(movable)

    def one(*parts: torch.Tensor) -> Any:
        payload = joined_parts(evaluation, parts, join)
        if isinstance(payload, Comparison):
            return evaluation.compared(payload, dtype)
        return evaluation.made(payload, dtype)

    return one(*results) if isinstance(results[0], torch.Tensor) else [one(*parts) for parts in zip(*results)]


def dtype_of_all(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype to which torch promotes the tensors that it joins."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


whole(*VIEWS.split())(view)
whole(*MOVES.split())(move)


# What makes tensors, or changes their type.


@whole("_to_copy.default")
def cast(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A cast: exact between floating types, whose values are wide; to integers it must not hang on rounding."""
    (a,) = args
    dtype = kwargs.get("dtype") or a.dtype
    payload = evaluation.given_as_it_is(a)
    if not isinstance(payload, Bounded | Comparison):
        return evaluation.made(lifted(payload), dtype) if dtype.is_floating_point else a.to(dtype, copy=True)
    if isinstance(payload, Comparison) and (dtype.is_floating_point or dtype == torch.bool):
        return evaluation.compared(payload, dtype)
    if dtype.is_floating_point:
        return evaluation.made(payload, dtype)
    if dtype == torch.bool:
        return evaluation.compared(payload != 0.0, dtype)
    return torch.from_numpy(np.array(whole_numbers(payload))).to(dtype)


def whole_numbers(payload: Payload) -> Array:
    """What a cast to integers makes of numbers: it must not hang on rounding."""
    if isinstance(payload, Comparison):
        return certain(payload).astype(np.int64)
    low, high = np.trunc(payload.value - payload.error), np.trunc(payload.value + payload.error)
    if ((low != high) & ~payload.terms.exact(payload.arithmetic)).any():
        raise ValueError("a cast to integers depends on rounding errors")
    return np.trunc(payload.value).astype(np.int64)


# The number with which an operator fills a tensor; None where it is an argument.
NUMBERS = {"full": None, "fill": None, "scalar_tensor": None, "zeros": 0, "zero": 0, "ones": 1, "empty": np.nan}
FILLS = (
    "full.default zeros.default ones.default empty.memory_format empty_strided.default scalar_tensor.default"
    " full_like.default zeros_like.default ones_like.default empty_like.default fill.Scalar fill.Tensor zero.default"
    " new_full.default new_zeros.default new_ones.default new_empty.default new_empty_strided.default"
)


@whole(*FILLS.split())
def fill(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A tensor of one number; of what is empty, nothing is known."""
    name = str(func).split(".")[1]
    like = args[0] if isinstance(args[0], torch.Tensor) else None
    shape = () if name == "scalar_tensor" else args[1] if name.startswith("new_") else args[0]
    shape = tuple(shape.shape if isinstance(shape, torch.Tensor) else shape)
    kind = name.removeprefix("new_").removesuffix("_strided").removesuffix("_like")
    number = NUMBERS[kind]
    if number is None:
        number = evaluation.given(kwargs["fill_value"] if "fill_value" in kwargs else args[-1])
    dtype = kwargs.get("dtype") or (like.dtype if like is not None else dtype_of_number(number, kind))
    if not dtype.is_floating_point:
        number = number.reshape(()).item() if isinstance(number, np.ndarray) else number
        return torch.full(shape, 0 if kind == "empty" else number, dtype=dtype)
    item = lifted(number)
    if kind == "empty":
        item = Bounded(item.value, np.full_like(item.value, np.inf), item.arithmetic)
    return evaluation.made(item.moved(lambda part: np.broadcast_to(part, shape)), dtype)


def dtype_of_number(number: Any, kind: str) -> torch.dtype:
    """The dtype that torch gives to a tensor of a Python number; only those of `full` may be of integers."""
    if kind != "full" or isinstance(number, float):
        return torch.get_default_dtype()
    return torch.bool if isinstance(number, bool) else torch.int64


@whole("arange.default", "arange.start", "arange.start_step", "linspace.default", "eye.default", "eye.m")
def sequence(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Numbers that torch makes in double precision; those that the arithmetic lacks are rounded once."""
    made = func(*args, **kwargs)
    if not made.is_floating_point():
        return made
    exact = func(*args, **{**kwargs, "dtype": torch.float64})
    return evaluation.made(lifted(exact.numpy()), made.dtype)


# Sums at places that are given.


def added_at(a: Bounded, places: Array, items: Bounded) -> Bounded:
    """a with each item added at its place, in any order: the terms of each place make a sum."""
    shape = a.shape
    places = places.reshape(-1)
    value, error, magnitude = a.value.reshape(-1).copy(), a.error.reshape(-1).copy(), abs(a.value).reshape(-1)
    np.add.at(value, places, items.value.reshape(-1))
    np.add.at(error, places, items.error.reshape(-1))
    magnitude = magnitude + a.error.reshape(-1)
    np.add.at(magnitude, places, (abs(items.value) + items.error).reshape(-1))
    count = np.bincount(places, minlength=value.size) + ((a.value != 0) | (a.error != 0)).reshape(-1)
    growth = np.where(count <= SEQUENTIAL_TERMS, np.maximum(count - 1, 0), SEQUENTIAL_TERMS + 2 * np.sqrt(count))
    grown = growth * a.arithmetic.roundoff * magnitude
    overflows = np.isfinite(magnitude) & ~(magnitude + grown <= a.arithmetic.largest)
    steps = np.where(growth > 0, ROUNDED_ONCE, 0.0)
    summed = rounded(value, error + grown, (Bounded(value, error, a.arithmetic),), steps, overflows)
    exact = (count <= 1) & (error == 0)
    summed.error = np.where(exact, 0.0, summed.error)
    return summed.reshape(shape)


def numbered(shape: Sequence[int]) -> torch.Tensor:
    """The places of a tensor's elements, counted along the flattened tensor."""
    size = int(np.prod(shape, dtype=int))
    return torch.arange(size).reshape(tuple(shape))


@aten("scatter_add.default")
def scatter_add(a: Any, dim: int, index: Array, items: Any) -> Bounded:
    """Each item added at the index that it has along an axis."""
    a, items = lifted(a), lifted(items)
    inside = tuple(slice(size) for size in index.shape)
    rows = numbered(a.shape)[
        tuple(slice(s) if i != dim % max(a.ndim, 1) else slice(None) for i, s in enumerate(index.shape))
    ]
    places = torch.gather(rows, dim, torch.from_numpy(np.array(index))).numpy()
    return added_at(a, places, items[inside] if a.ndim else items)


@aten("index_add.default")
def index_add(a: Any, dim: int, index: Array, items: Any, *, alpha: Any = 1) -> Bounded:
    """Each slice of the items added at its index along an axis."""
    a, items = lifted(a), scaled(lifted(items), alpha)
    return added_at(a, numbered(a.shape).index_select(dim, torch.from_numpy(np.array(index))).numpy(), items)


@aten("index_put.default", "_unsafe_index_put.default")
def index_put(a: Any, indices: Sequence[Any], items: Any, accumulate: bool = False) -> Bounded:
    """The items in place of the elements at the indices, or added to them."""
    a, items = lifted(a), lifted(items)
    taken = [
        None if i is None else torch.from_numpy(np.array(certain(i) if isinstance(i, Comparison) else i))
        for i in indices
    ]
    places = torch.ops.aten.index.Tensor(numbered(a.shape), taken).numpy()
    items = items.moved(lambda part: np.broadcast_to(part, places.shape))
    if accumulate:
        return added_at(a, places, items)
    result = Bounded(a.value.copy(), a.error.copy(), a.arithmetic)
    result.value.reshape(-1)[places], result.error.reshape(-1)[places] = items.value, items.error
    return result
