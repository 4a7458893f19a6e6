"""The rules of torch's operators that move elements, create tensors, cast them, or add at given places."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fourfold.numerics.bounded import Bounded, Comparison, HangsOnRounding, certain, lift
from fourfold.numerics.dtypes import QUANTISED
from fourfold.numerics.steps.along_axes import bounded_product, bounded_sum, concatenate
from fourfold.numerics.steps.elementwise import divide
from fourfold.numerics.torch_adapter.elementwise import aten, lift_operand, scaled
from fourfold.numerics.torch_adapter.integers import evaluate_integers, integers_of, truncate, whole_of
from fourfold.numerics.torch_adapter.tensors import (
    BoundedTensor,
    Evaluation,
    Payload,
    Tied,
    ViewedStorage,
    Whole,
    arithmetic,
    as_numpy,
    as_torch,
    index_places,
    iter_tensors,
    plain,
    strided_view,
    whole,
)

Array = np.ndarray

# Operators that move, omit or repeat elements. torch applies them to each part of a tensor.

VIEWS = (
    "alias.default as_strided.default detach.default diagonal.default expand.default permute.default select.int"
    " slice.Tensor split.Tensor split_with_sizes.default squeeze.default squeeze.dim squeeze.dims t.default"
    " transpose.int unbind.int unfold.default unsqueeze.default view.default _reshape_alias.default"
)
MOVES = (
    "clone.default _unsafe_view.default index_select.default index.Tensor flip.default roll.default"
    " tril.default triu.default repeat.default cat.default stack.default take.default"
    " lift_fresh.default lift.default rot90.default masked_select.default permute_copy.default"
    " _unsafe_index.Tensor diag_embed.default select_scatter.default slice_scatter.default"
    " diagonal_scatter.default index_copy.default copy.default masked_scatter.default as_strided_scatter.default"
    " _upsample_nearest_exact1d.default _upsample_nearest_exact2d.default _upsample_nearest_exact3d.default"
)
# The positions of the arguments whose elements are moved, unless it is the first one alone.
MOVED = {
    "select_scatter.default": (0, 1),
    "slice_scatter.default": (0, 1),
    "diagonal_scatter.default": (0, 1),
    "scatter.src": (0, 3),
    "index_copy.default": (0, 3),
    "copy.default": (0, 1),
    "as_strided_scatter.default": (0, 1),
    "masked_scatter.default": (0, 2),
}


def parts_of(evaluation: Evaluation, tensors: Sequence[torch.Tensor]) -> tuple[list[list[Array]], Callable]:
    """Return the arrays of each kind that several tensors consist of, and a function that makes a payload from them.

    The function takes one array of each kind.
    """
    payloads = [evaluation.payload_of(tensor) for tensor in tensors]
    if all(isinstance(payload, Comparison) for payload in payloads):
        parts = [[p.outcome for p in payloads], [p.uncertain for p in payloads]]
        if len(payloads) == 1 and isinstance(payloads[0], Tied):
            return [*parts, [payloads[0].ties], [payloads[0].kinks]], lambda a, b, *c: Tied(a, b, arithmetic(), *c)
        return parts, lambda a, b: Comparison(a, b, arithmetic())
    if all(isinstance(payload, Whole | np.ndarray) for payload in payloads):
        integers = [whole_of(payload) for payload in payloads]
        return [[n.outcome for n in integers], [n.low for n in integers], [n.high for n in integers]], Whole
    payloads = [p.bounded(arithmetic()) if isinstance(p, Whole) else p for p in payloads]
    numbers = [p if isinstance(p, Bounded) else evaluation.tidy(lift(p, evaluation.dtype.arithmetic)) for p in payloads]
    parts = [[n.value for n in numbers], [n.error for n in numbers]]
    if any(number.limit is not None for number in numbers):
        parts.append([evaluation.tidy(Bounded(n.least, n.error, n.arithmetic)).value for n in numbers])
    return parts, lambda value, error, least=None: Bounded(value, error, arithmetic(), least)


def move_parts(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict, places: Sequence[int]) -> Any:
    """Apply an operator to each part of its arguments at `places`; return lists of tensors and the joining function."""
    movable = [argument for place in places for argument in flat(args[place])]
    kinds, join = parts_of(evaluation, movable)
    results = []
    for arrays in kinds:
        parts = iter(map(as_torch, arrays))
        arguments = [
            (
                ([next(parts) for _ in arg] if isinstance(arg, list | tuple) else next(parts))
                if i in places
                else plain(arg)
            )
            for i, arg in enumerate(args)
        ]
        results.append(func(*arguments, **kwargs))
    return results, join, movable


def flat(argument: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of an argument that is a tensor or a list of tensors."""
    return argument if isinstance(argument, list | tuple) else [argument]


def torch_result(func: Any, args: tuple, kwargs: dict, places: Sequence[int]) -> Any:
    """Return torch's own result, where no moved element has an error."""
    return func(*map(plain, args), **kwargs)


def has_error(args: tuple, places: Sequence[int]) -> bool:
    """Return whether a moved argument is more than a plain tensor."""
    return any(isinstance(tensor, BoundedTensor) for tensor in iter_tensors([args[place] for place in places]))


def view(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return a view, which shares its base's memory."""
    if not has_error(args, (0,)):
        return torch_result(func, args, kwargs, (0,))
    if places := index_places(args[0]):
        return places.viewed(func, args, kwargs)
    base, dtype = args[0], args[0].dtype
    start = int(base.storage_offset())
    if str(func) == "aten.as_strided.default":
        _, shape, strides, *offsets = args
        start = int(offsets[0]) if offsets and offsets[0] is not None else start
        part = base.memory.payload.rearrange(lambda part: strided_view(part, shape, strides, start))
        return BoundedTensor.of(base.memory, part, dtype, start)
    results, join, _ = move_parts(evaluation, func, args, kwargs, (0,))

    def wrap(*parts: torch.Tensor) -> BoundedTensor:
        offset = start + int(parts[0].storage_offset())
        return BoundedTensor.of(base.memory, join_parts(evaluation, parts, join), dtype, offset)

    return wrap(*results) if isinstance(results[0], torch.Tensor) else [wrap(*parts) for parts in zip(*results)]


def join_parts(evaluation: Evaluation, parts: Sequence[torch.Tensor], join: Callable) -> Payload:
    """Join parts moved by torch to a payload."""
    return join(*(as_numpy(part, np.dtype(evaluation.dtype.wide)) for part in parts))


def move(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Move elements into a new memory."""
    places = MOVED.get(str(func).removeprefix("aten."), (0,))
    if (places_of_index := index_places(args[0])) and str(func) in ("aten.clone.default", "aten.flip.default"):
        options = {name: value for name, value in kwargs.items() if name != "memory_format"}
        return places_of_index.viewed(func, args, options)
    if not has_error(args, places):
        result = torch_result(func, args, kwargs, places)
        if str(func) != "aten.lift_fresh.default" or not result.is_floating_point():
            return result
        args = (result,)
    # Arrays with an error are always contiguous.
    kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    results, join, movable = move_parts(evaluation, func, args, kwargs, places)
    dtype = movable[0].dtype if len(places) > 1 else dtype_of_all(movable)

    def wrap(*parts: torch.Tensor) -> Any:
        payload = join_parts(evaluation, parts, join)
        if isinstance(payload, Comparison):
            return evaluation.compared(payload, dtype)
        return evaluation.wrap(payload, dtype)

    return wrap(*results) if isinstance(results[0], torch.Tensor) else [wrap(*parts) for parts in zip(*results)]


def dtype_of_all(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype to which torch promotes the tensors that it joins."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


whole(*VIEWS.split())(view)
whole(*MOVES.split())(move)


# Operators that create tensors, or change their type.


@whole("_to_copy.default")
def cast(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Cast: exactly between floating types, whose values are wide, except those of 8 bits.

    A cast to integers has the error of all integers that rounding may give.
    """
    (a,) = args
    dtype = kwargs.get("dtype") or a.dtype
    if (places := index_places(a)) and not dtype.is_floating_point and dtype != torch.bool:
        return BoundedTensor.of(ViewedStorage(places), places, dtype)
    payload = evaluation.payload_of(a)
    if isinstance(payload, Whole):
        if not dtype.is_floating_point and dtype != torch.bool:
            return evaluate_integers(evaluation, func, args, kwargs)
        payload = payload.bounded(evaluation.dtype.arithmetic)
    if not isinstance(payload, Bounded | Comparison):
        return evaluation.wrap(lift_operand(payload), dtype) if dtype.is_floating_point else a.to(dtype, copy=True)
    if isinstance(payload, Comparison) and (dtype.is_floating_point or dtype == torch.bool):
        return evaluation.compared(payload, dtype)
    if dtype.is_floating_point and isinstance(payload, Bounded):
        return evaluation.wrap(round_to_8_bits(payload, dtype), dtype)
    if dtype == torch.bool:
        return evaluation.compared(payload != 0.0, dtype)
    numbers = truncate(payload, dtype) if isinstance(payload, Bounded) else whole_of(payload)
    return integers_of(evaluation, numbers, dtype)


@whole("view.dtype")
def view_bits(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the bits of numbers as integers, or integers as the numbers that have their bits.

    Raises:
        HangsOnRounding: a number has an error, or is none of its dtype.
    """
    a, dtype = args
    if not isinstance(a, BoundedTensor) or not isinstance(numbers := a.payload, Bounded):
        return func(plain(a), dtype)
    tensor = torch.from_numpy(numbers.value.astype(np.float64)).to(a.dtype)
    if numbers.error.any() or not np.array_equal(tensor.double().numpy(), numbers.value, equal_nan=True):
        raise HangsOnRounding("the bits of a number depend on rounding errors")
    return func(tensor, dtype)


@whole("frexp.Tensor")
def mantissa_and_exponent(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return numbers between 1/2 and 1, and powers of 2; where rounding may change the power, both are open."""
    a = lift_operand(evaluation.unwrap(args[0]))
    fraction, power = np.frexp(a.value)
    ends = np.stack([np.frexp(abs(a.value) + sign * a.error)[1] for sign in (-1, 0, 1)]).astype(np.float64)
    low, high = ends.min(0), ends.max(0)
    unknown = (a.error > 0) & ~(abs(a.value) > a.error)
    low, high = np.where(unknown, -np.inf, low), np.where(unknown, np.inf, high)
    error = np.where((low == high) | (a.error == 0), np.ldexp(a.error, -power), 2.0)
    powers = integers_of(evaluation, Whole(power.astype(np.float64), low, high), torch.int32)
    return evaluation.wrap(Bounded(fraction, error, a.arithmetic), args[0].dtype), powers


def round_to_8_bits(a: Bounded, dtype: torch.dtype) -> Bounded:
    """Return `a` rounded to nearest even where `dtype` has 8 bits, and `a` itself for any other type.

    The result lies between those of both ends of the bound. Nothing is known of what may not round to a number of the
    type: torch makes it NaN or infinite, and a GPU's instruction the largest number.
    """
    kind = QUANTISED.get(str(dtype).removeprefix("torch."))
    if kind is None:
        return a
    with np.errstate(all="ignore"):
        value, low, high = (
            part.astype(np.float32).astype(kind.numpy).astype(a.value.dtype)
            for part in (a.value, a.value - a.error, a.value + a.error)
        )
        error = np.maximum(value - low, high - value)
        error = np.where(abs(a.value) + a.error >= kind.overflow, np.inf, error)
        return Bounded(value, np.where(np.isnan(a.value), 0, error), a.arithmetic)


# The number with which an operator fills a tensor; None if it is an argument.
NUMBERS = {
    "full": None,
    "fill": None,
    "scalar_tensor": None,
    "zeros": 0,
    "zero": 0,
    "_efficientzerotensor": 0,
    "ones": 1,
    "empty": np.nan,
}
FILLS = (
    "full.default zeros.default ones.default empty.memory_format empty_strided.default scalar_tensor.default"
    " full_like.default zeros_like.default ones_like.default empty_like.default fill.Scalar fill.Tensor zero.default"
    " new_full.default new_zeros.default new_ones.default new_empty.default new_empty_strided.default"
    " _efficientzerotensor.default"
)


@whole(*FILLS.split())
def fill(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return a tensor filled with one number; the elements of an empty tensor are unknown."""
    name = str(func).split(".")[1]
    template = args[0] if isinstance(args[0], torch.Tensor) else None
    shape = () if name == "scalar_tensor" else args[1] if name.startswith("new_") else args[0]
    shape = tuple(shape.shape if isinstance(shape, torch.Tensor) else shape)
    kind = name.removeprefix("new_").removesuffix("_strided").removesuffix("_like")
    number = NUMBERS[kind]
    if number is None:
        number = evaluation.unwrap(kwargs["fill_value"] if "fill_value" in kwargs else args[-1])
    dtype = kwargs.get("dtype") or (template.dtype if template is not None else dtype_of_number(number, kind))
    if not dtype.is_floating_point:
        number = number.reshape(()).item() if isinstance(number, np.ndarray) else number
        return torch.full(shape, 0 if kind == "empty" else number, dtype=dtype)
    if name == "scalar_tensor" and evaluation.backward and number == torch.finfo(dtype).min:
        # The gradient of logcumsumexp uses the lowest number as the logarithm of 0: the step after it may overflow.
        number = -np.inf
    item = lift_operand(number)
    if kind == "empty":
        item = Bounded(item.value, np.full_like(item.value, np.inf), item.arithmetic)
    return evaluation.wrap(item.rearrange(lambda part: np.broadcast_to(part, shape)), dtype)


def dtype_of_number(number: Any, kind: str) -> torch.dtype:
    """Return the dtype of a tensor that torch makes from a Python number; only `full` makes tensors of integers."""
    if kind != "full" or isinstance(number, float):
        return torch.get_default_dtype()
    return torch.bool if isinstance(number, bool) else torch.int64


@whole("arange.default", "arange.start", "arange.start_step", "linspace.default", "eye.default", "eye.m")
def sequence(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return numbers that torch computes in double precision, rounded once if the arithmetic cannot represent them."""
    result = func(*args, **kwargs)
    if not result.is_floating_point():
        return result
    exact = func(*args, **{**kwargs, "dtype": torch.float64})
    return evaluation.wrap(lift_operand(exact.numpy()), result.dtype)


# Sums at given places.


def add_at(a: Bounded, places: Array, items: Bounded) -> Bounded:
    """Return `a` with each item added at its place, in any order: the terms of each place form a sum."""
    places, terms = places.reshape(-1), concatenate([a.reshape(-1), items.reshape(-1)])

    def add(part: Array) -> Array:
        sums = part[: a.size].copy()
        np.add.at(sums, places, part[a.size :])
        return sums

    count = np.bincount(places, minlength=a.size) + ((a.value != 0) | (a.error != 0)).reshape(-1)
    result = bounded_sum(terms, count, add)
    result.error = np.where((count <= 1) & (add(terms.error) == 0), 0.0, result.error)
    return result.reshape(a.shape)


def element_numbers(shape: Sequence[int]) -> torch.Tensor:
    """Return the places of a tensor's elements, counted along the flattened tensor."""
    size = int(np.prod(shape, dtype=int))
    return torch.arange(size).reshape(tuple(shape))


def along(a: Bounded, dim: int, index: Array) -> Array:
    """Return the places of the elements of `a` at the indices along an axis, counted along the flattened `a`."""
    axis = dim % max(a.ndim, 1)
    rows = element_numbers(a.shape)[tuple(slice(None if i == axis else size) for i, size in enumerate(index.shape))]
    return torch.gather(rows, dim, torch.from_numpy(np.array(index))).numpy()


def scatter_add(a: Any, dim: int, index: Array, items: Any) -> Bounded:
    """Add each item at its index along an axis."""
    a, items = lift_operand(a), lift_operand(items)
    return add_at(a, along(a, dim, index), items[tuple(map(slice, index.shape))] if a.ndim else items)


@aten("scatter_reduce.two")
def scatter_reduce(a: Any, dim: int, index: Array, items: Any, reduce: str, *, include_self: bool = True) -> Bounded:
    """Return the sum, mean or extreme of the items at each index along an axis.

    The number that is already there is included unless `include_self` is False.
    """
    a, items = lift_operand(a), lift_operand(items)
    places, items = along(a, dim, index), items[tuple(map(slice, index.shape))]
    count = np.bincount(places.reshape(-1), minlength=a.size).reshape(a.shape)
    is_replaced = (count > 0) & (not include_self)
    if reduce in ("sum", "mean"):
        start = Bounded(np.where(is_replaced, 0, a.value), np.where(is_replaced, 0, a.error), a.arithmetic)
        sums = add_at(start, places, items)
        return divide(sums, lift_operand(np.maximum(count + include_self, 1))) if reduce == "mean" else sums
    if reduce == "prod":
        start = Bounded(np.where(is_replaced, 1, a.value), np.where(is_replaced, 0, a.error), a.arithmetic)
        factors, flat = concatenate([start.reshape(-1), items.reshape(-1)]), places.reshape(-1)

        def multiply(part: Array) -> Array:
            products = part[: a.size].copy()
            np.multiply.at(products, flat, part[a.size :])
            return products

        return bounded_product(factors, (count + 1).reshape(-1), multiply).reshape(a.shape)
    choose, last = (np.maximum, -np.inf) if reduce == "amax" else (np.minimum, np.inf)

    def ends(sign: int) -> Array:
        values = np.where(is_replaced, last, a.value + sign * a.error).reshape(-1)
        choose.at(values, places.reshape(-1), (items.value + sign * items.error).reshape(-1))
        return values.reshape(a.shape)

    low, value, high = map(ends, (-1, 0, 1))
    error = np.where((high == low) | np.isnan(value), 0.0, np.maximum(high - value, value - low))
    return Bounded(value, np.where(np.isnan(error), np.inf, error), a.arithmetic)


@aten("index_add.default")
def index_add(a: Any, dim: int, index: Array, items: Any, *, alpha: Any = 1) -> Bounded:
    """Add each slice of the items at its index along an axis."""
    a, items = lift_operand(a), scaled(lift_operand(items), alpha)
    return add_at(a, element_numbers(a.shape).index_select(dim, torch.from_numpy(np.array(index))).numpy(), items)


@whole("scatter.value")
def scatter_number(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Put one number at the indices."""
    a, dim, index, number = args
    items = fill(evaluation, torch.ops.aten.full.default, (index.shape, number), {"dtype": a.dtype})
    return evaluation.call(torch.ops.aten.scatter.src, (a, dim, index, items), {})


@aten("constant_pad_nd.default")
def pad(a: Any, widths: Sequence[int], number: Any = 0) -> Bounded:
    """Pad with a number, by `widths` from the last axis on; negative widths cut elements off."""
    a = lift_operand(a)
    pairs = [tuple(widths[i : i + 2]) for i in range(0, len(widths), 2)][::-1]
    pairs = [(0, 0)] * (a.ndim - len(pairs)) + pairs
    inner = a[tuple(slice(max(-left, 0), size - max(-right, 0)) for (left, right), size in zip(pairs, a.shape))]
    outer_widths = [(max(left, 0), max(right, 0)) for left, right in pairs]
    constant = lift_operand(number)
    value = np.pad(inner.value, outer_widths, constant_values=constant.value)
    error = np.pad(inner.error, outer_widths, constant_values=constant.error)
    return Bounded(value, error, a.arithmetic)


@aten("embedding.default")
def embedding(weight: Any, index: Array, *_: Any) -> Bounded:
    """Return the rows of a table."""
    return lift_operand(weight)[index]


@aten("embedding_dense_backward.default")
def embedding_backward(grad: Any, index: Array, rows: int, padding: int, by_frequency: bool) -> Bounded:
    """Return the sum of each row's gradients; the padding row has none."""
    grad, places = lift_operand(grad), np.array(index).reshape(-1)
    grad = grad.reshape(places.size, grad.shape[-1])
    if by_frequency:
        grad = grad / np.bincount(places, minlength=rows)[places][:, None]
    grad = grad[places != padding]
    empty = Bounded.exact(np.zeros((rows, grad.shape[1]), grad.dtype), grad.arithmetic)
    return index_add(empty, 0, places[places != padding], grad)


@aten("put.default")
def put(a: Any, index: Array, items: Any, accumulate: bool = False) -> Bounded:
    """Put or add the items at places counted along the flattened tensor."""
    a = lift_operand(a)
    return index_put(a.reshape(-1), [index], items, accumulate).reshape(a.shape)


@aten("index_put.default", "_unsafe_index_put.default")
def index_put(a: Any, indices: Sequence[Any], items: Any, accumulate: bool = False) -> Bounded:
    """Put the items at the indices, or add them there."""
    a, items = lift_operand(a), lift_operand(items)
    positions = [
        None if i is None else torch.from_numpy(np.array(certain(i) if isinstance(i, Comparison) else i))
        for i in indices
    ]
    places = torch.ops.aten.index.Tensor(element_numbers(a.shape), positions).numpy()
    items = items.rearrange(lambda part: np.broadcast_to(part, places.shape))
    if accumulate:
        return add_at(a, places, items)
    result = Bounded(a.value.copy(), a.error.copy(), a.arithmetic)
    result.value.reshape(-1)[places], result.error.reshape(-1)[places] = items.value, items.error
    return result
