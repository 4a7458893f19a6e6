"""Tensors that carry a bound on their error, and the dispatch of torch's operators to their rules.

A rule propagates the error through an operator: see `rule`. The rules of torch's own operators are in the other modules
of `fourfold.numerics.torch_adapter`.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fourfold.compat.torch_internals import decompositions, dispatch_mode, wrapper_tensor
from fourfold.numerics.bounded import (
    Arithmetic,
    Bounded,
    Comparison,
    Contract,
    HangsOnRounding,
    NoRule,
    certain,
    lift,
    stored,
)
from fourfold.numerics.dtypes import DType
from fourfold.numerics.torch_adapter.composites import COMPOSITES, on_each
from fourfold.numerics.torch_adapter.parameters import Numbers
from fourfold.numerics.torch_adapter.ranking import Ranking

Array = np.ndarray


class NoTorchRule(NoRule):
    """torch ran an operator, of this full name, that has no running-error rule."""

    def __init__(self, operator: object, message: str) -> None:
        super().__init__(f"{operator} {message}")
        self.operator = str(operator)


@dataclass(frozen=True, eq=False)
class Tied(Comparison):
    """A comparison in a forward pass that records where its operands are equal.

    `kinks` is modified in place: it marks the ties where two alternatives selected by the comparison have the same
    value. The function is continuous there, and every derivative between the one-sided ones is right. Where the values
    differ, the function jumps, and the derivative is that of the selected alternative.
    """

    ties: Array
    kinks: Array

    def rearrange(self, move: Callable[[Array], Array]) -> "Tied":
        """Return the comparison with its elements rearranged by `move` like those of a plain array."""
        return Tied(move(self.outcome), move(self.uncertain), self.arithmetic, move(self.ties), move(self.kinks))

    def free(self) -> Comparison:
        """Return the comparison for a backward pass: uncertain at a kink."""
        return Comparison(self.outcome, self.uncertain | self.kinks, self.arithmetic)


@dataclass(frozen=True, eq=False)
class Whole:
    """Integers that rounding may change: those of the exact numbers, and the least and the largest that may be.

    Nothing is known of an integer between two infinities.
    """

    outcome: Array
    low: Array
    high: Array

    def rearrange(self, move: Callable[[Array], Array]) -> "Whole":
        """Return the integers with their elements rearranged by `move` like those of a plain array."""
        return Whole(move(self.outcome), move(self.low), move(self.high))

    def bounded(self, arithmetic: Arithmetic) -> Bounded:
        """Return the integers with a bound on the error of each."""
        error = np.maximum(self.high - self.outcome, self.outcome - self.low)
        return Bounded(self.outcome, error, arithmetic, self.low)


# Operators that put the elements of a tensor in another order.
REORDERING = {"flip", "t", "transpose", "permute", "as_strided", "unfold", "roll", "rot90"}


@dataclass(frozen=True, eq=False)
class Places:
    """The indices along an axis where numbers of `source` were found, and these numbers, `values`.

    Where two numbers of a row are equal, or differ by less than their errors, each may have been found at either place.

    Attributes:
        index: the indices.
        source: the numbers.
        values: the numbers at the indices.
        axis: the axis.
        order: how the indices order the numbers; None if their places are no choice of the results.
    """

    index: Array
    source: Bounded
    values: Bounded
    axis: int
    order: Ranking | None = None

    @property
    def outcome(self) -> Array:
        """The indices of the exact numbers."""
        return self.index

    def rows(self, part: Array) -> Array:
        """Return an array as rows along the axis, which the array may lack."""
        part = part if part.ndim == self.source.ndim else np.expand_dims(part, self.axis)
        part = np.moveaxis(part, self.axis, -1)
        return part.reshape(-1, part.shape[-1])

    def groups(self, with_ties: bool) -> tuple[Array, int]:
        """Return the group of each number of each row, and the number of groups.

        The order within a group depends on rounding. Equal numbers without an error form a group only `with_ties`.
        """
        value, error = self.rows(self.source.value), self.rows(self.source.error)
        order = np.argsort(value, axis=1, kind="stable")
        high, low = (np.take_along_axis(part, order, 1) for part in (value + error, value - error))
        highest = np.maximum.accumulate(high, axis=1)[:, :-1]
        is_separate = highest < low[:, 1:] if with_ties else ~(highest > low[:, 1:])
        first = np.ones_like(value, dtype=np.int64)
        first[:, 1:] = is_separate
        group = np.empty_like(first)
        np.put_along_axis(group, order, (np.cumsum(first) - 1).reshape(first.shape), 1)
        return group, int(first.sum())

    def certain(self) -> Array:
        """Return the indices. Among equal exact numbers, torch's choice is kept.

        Raises:
            HangsOnRounding: an index depends on rounding.
        """
        group, count = self.groups(with_ties=False)
        groups = np.take_along_axis(group, self.rows(self.index), 1)
        if (np.bincount(group.reshape(-1), minlength=count)[groups] > 1).any():
            raise HangsOnRounding("the order of numbers depends on rounding errors, and so do their indices")
        return self.index

    def spread(self, grad: Bounded, with_ties: bool) -> Bounded:
        """Put the gradients of the places at the numbers.

        Each number of a group may receive the gradient of any of the group's places, or none if these are fewer.
        """
        group, count = self.groups(with_ties)
        rows, index = np.arange(len(group))[:, None], self.rows(self.index)
        value, error = np.zeros(group.shape, grad.dtype), np.zeros(group.shape, grad.dtype)
        value[rows, index], error[rows, index] = self.rows(grad.value), self.rows(grad.error)
        low, high = np.full(count, np.inf, grad.dtype), np.full(count, -np.inf, grad.dtype)
        places = group[rows, index]
        np.minimum.at(low, places, (value - error)[rows, index])
        np.maximum.at(high, places, (value + error)[rows, index])
        size, counts = np.bincount(group.reshape(-1), minlength=count), np.bincount(places.reshape(-1), minlength=count)
        low, high = (
            np.where(counts < size, limit(end, 0), end) for limit, end in ((np.minimum, low), (np.maximum, high))
        )
        reach = np.where((size > 1) & (counts > 0), np.stack([low, high]), np.nan)[:, group]
        error = np.fmax(error, np.fmax(reach[1] - value, value - reach[0]))
        shape = np.moveaxis(self.source.value, self.axis, -1).shape
        value, error = (np.moveaxis(part.reshape(shape), -1, self.axis) for part in (value, error))
        return Bounded(value, error, grad.arithmetic)

    def nearest(self, actual: Array) -> Array:
        """Return the right indices that are nearest to those of `actual`, in its shape.

        Raises:
            HangsOnRounding: other indices may be right, and it is not known which.
        """
        if self.order is None:
            return self.certain()
        row, rank = self.positions()
        return self.order.nearest(actual, self.index, row, rank)

    def positions(self) -> tuple[Array, Array]:
        """Return the row and the place in the order of each index."""
        assert self.order is not None
        rows = self.rows(self.index)
        indices = np.indices(rows.shape)
        index = self.index if self.index.ndim == self.source.ndim else np.expand_dims(self.index, self.axis)
        shape = np.moveaxis(index, self.axis, -1).shape
        row, rank = (
            np.moveaxis(part.reshape(shape), -1, self.axis).reshape(self.index.shape)
            for part in (indices[0], indices[1] + self.order.first)
        )
        return row, rank

    def viewed(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return a view of the indices: the same places if it only drops or restores the axis, else some of them."""
        index = func(torch.from_numpy(self.index), *args[1:], **kwargs)
        in_order = self.order is None or str(func).split(".")[1] not in REORDERING
        if in_order and isinstance(index, torch.Tensor) and index.numel() == self.index.size:
            shape = self.source.shape
            sizes = tuple(index.shape)
            if sizes in (self.index.shape, shape[: self.axis] + shape[self.axis + 1 :]) or (
                len(sizes) == len(shape) and all(i == self.axis or sizes[i] == shape[i] for i in range(len(shape)))
            ):
                places = Places(index.numpy(), self.source, self.values.reshape(sizes), self.axis, self.order)
                return BoundedTensor.of(ViewedStorage(places), places, args[0].dtype)
        if self.order is not None:
            return self.some(func, args, kwargs)
        self.certain()
        return index

    def some(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return some of the indices, which an operator picks or moves, or lists of them."""

        def join(index: torch.Tensor, row: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
            parts = [np.array(part.numpy(), order="C") for part in (index, row, rank)]
            places = SomePlaces(self, *parts)
            return BoundedTensor.of(ViewedStorage(places), places, args[0].dtype)

        moved = [func(torch.from_numpy(part), *args[1:], **kwargs) for part in (self.index, *self.positions())]
        return join(*moved) if isinstance(moved[0], torch.Tensor) else [join(*parts) for parts in zip(*moved)]


class SomePlaces(Places):
    """Some of the indices of `Places`, in any shape, with the row and the place in the order of each."""

    def __init__(self, base: Places, index: Array, row: Array, rank: Array) -> None:
        for name, value in {"index": index, "source": base.source, "values": base.values, "axis": base.axis}.items():
            object.__setattr__(self, name, value)
        for name, value in {"order": base.order, "row": row, "rank": rank, "base": base}.items():
            object.__setattr__(self, name, value)

    row: Array
    rank: Array
    base: Places

    def positions(self) -> tuple[Array, Array]:
        """Return the row and the place in the order of each index."""
        return self.row, self.rank

    def certain(self) -> Array:
        """Return the indices; see `Places.certain`."""
        self.base.certain()
        return self.index

    def viewed(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return a view of the indices."""
        return self.some(func, args, kwargs)


Payload = Bounded | Comparison | Whole


@dataclass(eq=False)
class ViewedStorage:
    """The memory shared by tensors that are views of each other. Its arrays are replaced, never modified."""

    payload: Any
    version: int = 0
    # A note of the rule that made the tensor, for the rule to which autograd passes it.
    note: Any = None


class BoundedTensor(torch.Tensor):
    """A tensor whose elements are those of a `Bounded` array, or of an uncertain `Comparison`."""

    memory: ViewedStorage
    part: Any
    part_version: int

    @staticmethod
    def of(memory: ViewedStorage, part: Any, dtype: torch.dtype, offset: int = 0) -> "BoundedTensor":
        """Return a tensor that is `part` of a memory and begins `offset` elements after the memory's first."""
        value = part.value if isinstance(part, Bounded) else part.outcome
        strides = tuple(stride // value.itemsize for stride in value.strides)
        self = wrapper_tensor(BoundedTensor, value.shape, strides, offset, dtype)
        self.memory, self.part, self.part_version = memory, part, memory.version
        return self

    @property
    def payload(self) -> Any:
        """The elements, including everything written into the memory so far."""
        if self.part_version != self.memory.version:
            place = (tuple(self.shape), self.stride(), int(self.storage_offset()))
            self.part, self.part_version = (
                self.memory.payload.rearrange(lambda part: strided_view(part, *place)),
                self.memory.version,
            )
        return self.part

    def __repr__(self, **_: Any) -> str:
        part = self.payload
        return f"BoundedTensor({part.value if isinstance(part, Bounded) else part.outcome}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return current().call(func, args, kwargs or {})


def index_places(index: Any) -> Places | None:
    """Return the `Places` of a tensor of indices, or None."""
    return index.payload if isinstance(index, BoundedTensor) and isinstance(index.payload, Places) else None


def strided_view(part: Array, shape: Sequence[int], strides: Sequence[int], offset: int) -> Array:
    """Return a view of a contiguous array, as torch.as_strided makes it: strides and offset count elements."""
    places = [stride * part.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(part.reshape(-1)[offset:], shape, places)


def as_torch(part: Array) -> torch.Tensor:
    """Return a tensor that shares an array's memory; long doubles become complex numbers of the same size."""
    return torch.from_numpy(part.view(np.complex128) if part.dtype == np.longdouble else part)


def as_numpy(tensor: torch.Tensor, like: np.dtype) -> Array:
    """Return the array of a tensor from `as_torch`, or of a tensor that torch computed from one by moving elements."""
    array = tensor.numpy()
    return array.view(like) if array.dtype != like and array.dtype == np.complex128 else array


# By the operator's full name, as "aten.add.Tensor".
RULES: dict[str, Callable[..., Any]] = {}


def rule(*overloads: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the rule of operators, which propagates errors through them.

    The function is called as the operator is, with a `Bounded` for each floating tensor, a `Comparison` or an array of
    bool for each tensor of bool, and an array for each tensor of integers. It returns a `Bounded`, a `Comparison`, an
    array, or a tuple of them. `rounded` in `fourfold.numerics.steps.elementwise` makes the result of a step.

    Args:
        overloads: operators with their overloads, like ``torch.ops.aten.erfinv.default``, or their names, like
            ``"aten.erfinv.default"``.

    Raises:
        TypeError: an operator is given without its overload.
    """
    for overload in overloads:
        if str(overload).count(".") != 2:
            raise TypeError(f"rule: {overload} is no operator with its overload, as aten.erfinv.default is one")

    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update({str(overload): compute for overload in overloads})
        return compute

    return register


# Rules that receive the evaluation, the operator and its unconverted arguments, tensors included.
WHOLE: dict[str, Callable[["Evaluation", Any, tuple, dict[str, Any]], Any]] = {}


def whole(*names: str) -> Callable:
    """Register the decorated function as the rule of aten operators that concern tensors rather than their values."""

    def register(compute: Callable) -> Callable:
        WHOLE.update({f"aten.{name}": compute for name in names})
        return compute

    return register


# The rule of all operators on integers that rounding may change: see `fourfold.numerics.torch_adapter.integers`.
INTEGERS: list[Callable[["Evaluation", Any, tuple, dict[str, Any]], Any]] = []
# The rule of all operators on complex numbers: see `fourfold.numerics.torch_adapter.complex_numbers`.
COMPLEX: list[Callable[["Evaluation", Any, tuple, dict[str, Any]], Any]] = []

# Operators whose results are elements of their operands, or zero.
SELECTING = {
    *("abs", "neg", "relu", "sign", "sgn", "where", "masked_fill", "clamp", "clamp_min", "clamp_max", "hardtanh"),
    *("maximum", "minimum", "fmax", "fmin", "amax", "amin", "max", "min", "sort", "topk", "kthvalue", "median", "mode"),
    *("cat", "stack", "gather", "index", "index_select", "embedding", "constant_pad_nd", "tril", "triu", "flip"),
    *(
        "threshold_backward",
        "index_put",
        "_unsafe_index_put",
        "scatter",
        "slice_scatter",
        "select_scatter",
        "put",
        "roll",
    ),
}
# Operators of several steps, which are decomposed if each step is rounded.
FUSED = {
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "logsumexp"),
    *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
    *("native_batch_norm", "native_batch_norm_backward"),
}
# Operators whose result keeps the ties of the comparisons among its operands.
LOGICAL: set[str] = set()


def has_error(tensor: torch.Tensor) -> bool:
    """Return whether a tensor carries an error or the ties of a comparison, or may, being of a floating type."""
    return isinstance(tensor, BoundedTensor) or tensor.is_floating_point()


def is_of_integers(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors hold integers or truth values, and rounding may change one of them."""
    return not any(tensor.is_floating_point() for tensor in tensors) and any(
        isinstance(tensor, BoundedTensor) for tensor in tensors
    )


def may_differ(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is more than certain integers or truth values."""
    certainly = isinstance(tensor, BoundedTensor) and tensor.dtype == torch.bool and not tensor.payload.uncertain.any()
    return has_error(tensor) and not certainly


_running = threading.local()


def current() -> "Evaluation":
    """Return the evaluation that runs in this thread."""
    evaluation = getattr(_running, "evaluation", None)
    if evaluation is None:
        raise NoRule("a tensor with an error bound was used outside of the evaluation that made it")
    return evaluation


def arithmetic() -> Arithmetic:
    """Return the arithmetic of the evaluation that runs in this thread."""
    return current().dtype.arithmetic


def iter_tensors(arguments: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor among the arguments of an operator."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from iter_tensors(argument)


def result_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the floating dtype to which torch promotes tensors; scalars count only if there are no others."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    ranked = [tensor.dtype for tensor in floating if tensor.ndim] or [tensor.dtype for tensor in floating]
    return functools.reduce(torch.promote_types, ranked) if ranked else torch.get_default_dtype()


class Evaluation(dispatch_mode()):  # type: ignore[misc]
    """A dispatch mode that passes every operator of torch to its rule.

    Attributes:
        dtype: the tested dtype, whose arithmetic the rules use.
        backward: whether autograd is computing gradients.
        missing: the error for an operator without a rule, which Python's operators replace by another TypeError.
        numbers: the errors of the parameters, and of the numbers that Python computes from them.
    """

    def __init__(self, dtype: DType):
        super().__init__()
        self.dtype, self.backward = dtype, False
        self.outer: list[Any] = []
        self.missing: NoTorchRule | None = None
        self.numbers = Numbers(dtype.arithmetic)

    @property
    def contract(self) -> Contract:
        """Return what results leave open."""
        return self.dtype.arithmetic.contract

    def __enter__(self) -> Any:
        self.outer.append(getattr(_running, "evaluation", None))
        _running.evaluation = self
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        _running.evaluation = self.outer.pop()
        super().__exit__(*failure)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator: by its rule, in place, by torch itself if there is no error, or by its decomposition."""
        name = str(func)
        if any(tensor.is_complex() for tensor in iter_tensors(args)) or any(isinstance(x, complex) for x in args):
            return COMPLEX[0](self, func, args, kwargs)
        if special := WHOLE.get(name):
            return special(self, func, args, kwargs)
        library, operator, overload = name.split(".")
        if operator.startswith("_foreach_"):
            with self:
                return on_each(func, args, kwargs)
        if operator.endswith("_") and not operator.endswith("__"):
            packet = getattr(getattr(torch.ops, library), operator[:-1], None)
            functional = getattr(packet, overload, None)
            if packet is not None and functional is None and torch.Tag.inplace_view in func.tags:
                # In-place operators that change a shape have overloads with other names.
                functional = getattr(packet, packet.overloads()[0])
            return self.write(func, functional, args, kwargs)
        tensors = list(iter_tensors((*args, *kwargs.values())))
        settled = not self.backward and name not in LOGICAL and not any(map(may_differ, tensors))
        if settled or not any(map(has_error, tensors)):
            result = func(*map(plain, args), **kwargs)
            if not any(tensor.is_floating_point() for tensor in iter_tensors([result])):
                return result
        if not self.backward and is_of_integers(tensors):
            result = INTEGERS[0](self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        is_stepwise = self.dtype.arithmetic.rounds_each_step and operator in FUSED and name in decompositions()
        if not is_stepwise and (compute := RULES.get(name)):
            options = {key: self.unwrap(value) for key, value in kwargs.items() if key not in UNUSED}
            result = self.rounded(name, compute(*map(self.unwrap, args), **options))
            requested = kwargs.get("dtype")
            floating = requested is not None and requested.is_floating_point
            return self.wrap(result, requested if floating else result_dtype(tensors))
        return self.run_decomposition(func, name, args, kwargs)

    def rounded(self, name: str, result: Any) -> Any:
        """Round the result of a step if the arithmetic rounds each step, unless the step only selects numbers."""
        operator = name.split(".")[1]
        if not self.dtype.arithmetic.rounds_each_step or operator in SELECTING:
            return result
        if isinstance(result, tuple):
            return tuple(map(stored, result))
        return stored(result)

    def run_decomposition(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator without a rule by torch's decomposition of it."""
        tensors = list(iter_tensors((*args, *kwargs.values())))
        if tensors and not any(tensor.is_floating_point() for tensor in tensors):
            return func(*map(plain, args), **kwargs)
        try:
            with self:
                decomposition = COMPOSITES.get(name) or decompositions().get(name, func.decompose)
                result = decomposition(*args, **kwargs)
        except NoTorchRule as error:
            # The operators below aten are unknown to users: name the one that they called.
            if not error.operator.startswith("prims."):
                raise
            result = NotImplemented
        if result is NotImplemented:
            self.missing = NoTorchRule(
                name,
                "has no running-error rule, and torch does not take it apart: no bound of its rounding errors is known."
                " Write the definition with simpler functions, such as sums, products and torch.where, or give a rule:"
                f" @fourfold.numerics.torch_adapter.evaluate.rule(torch.ops.{name}) makes a function the rule of this"
                " operator",
            )
            raise self.missing
        return result

    def payload_of(self, tensor: torch.Tensor) -> Any:
        """Return a tensor's payload, including the ties of a comparison."""
        if isinstance(tensor, BoundedTensor) and not isinstance(tensor.payload, Places):
            return tensor.payload
        return self.unwrap(tensor)

    def unwrap(self, argument: Any) -> Any:
        """Convert an argument to the form that rules take."""
        if isinstance(argument, BoundedTensor):
            payload = argument.payload
            if isinstance(payload, Places):
                return payload.certain()
            if isinstance(payload, Whole):
                return payload.bounded(self.dtype.arithmetic)
            return payload.free() if self.backward and isinstance(payload, Tied) else payload
        if isinstance(argument, torch.Tensor):
            if argument.is_floating_point():
                return Bounded.exact(self.dtype.array(argument), self.dtype.arithmetic)
            return argument.numpy()
        if isinstance(argument, list | tuple):
            return type(argument)(map(self.unwrap, argument))
        return argument

    def wrap(self, result: Any, dtype: torch.dtype) -> Any:
        """Convert the result of a rule to tensors."""
        if isinstance(result, Bounded):
            payload: Payload = self.tidy(result)
            return BoundedTensor.of(ViewedStorage(payload), payload, dtype)
        if isinstance(result, Comparison):
            return self.compared(result, torch.bool)
        if isinstance(result, Whole):
            part = result.rearrange(lambda array: np.array(array, dtype=np.float64, order="C"))
            return BoundedTensor.of(ViewedStorage(part), part, dtype)
        if isinstance(result, list | tuple):
            return type(result)(self.wrap(part, dtype) for part in result)
        if isinstance(result, np.ndarray | np.generic):
            return torch.from_numpy(np.array(result))
        return result

    def compared(self, result: Comparison, dtype: torch.dtype) -> torch.Tensor:
        """Return a comparison as a tensor of bool, or of ones and zeros: a plain one where it is certain.

        The backward pass of a clamp writes one comparison into another, and either may be uncertain.
        """
        matters = result.uncertain.any() or (isinstance(result, Tied) and result.ties.any())
        if not matters and dtype == torch.bool and not self.backward:
            return torch.from_numpy(np.array(result.outcome))
        part = result.rearrange(lambda array: np.array(array, order="C"))
        return BoundedTensor.of(ViewedStorage(part), part, dtype)

    def tidy(self, result: Bounded) -> Bounded:
        """Return an array with contiguous parts of the wide type and of a common shape."""

        def settled(part: Any) -> Array:
            part = np.asarray(part, dtype=self.dtype.wide)
            part = np.broadcast_to(part, shape) if part.shape != shape else part
            return part if part.flags.c_contiguous and part.flags.writeable else np.array(part, order="C")

        shape = np.shape(result.value)
        value, error = settled(result.value), settled(result.error)
        limit = None if result.limit is None else settled(result.limit)
        if value is result.value and error is result.error and limit is result.limit:
            return result
        return Bounded(value, error, result.arithmetic, limit)

    def write(self, func: Any, functional: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator that writes into its first argument; the former elements are kept for other tensors."""
        target, *_ = args
        if not isinstance(target, BoundedTensor):
            tensors = list(iter_tensors((*args, *kwargs.values())))
            if not any(isinstance(tensor, BoundedTensor) for tensor in tensors):
                return func(*args, **kwargs)
            if not target.dtype.is_floating_point and functional is not None:
                # `plain` refuses what rounding may change.
                return target.copy_(plain(self.call(functional, args, kwargs)))
            raise NoTorchRule(func, "would write numbers with an error into a tensor that was made without one")
        if torch.Tag.inplace_view in func.tags and functional is not None:
            viewed = self.call(functional, args, kwargs)
            target.data = viewed
            target.memory, target.part, target.part_version = viewed.memory, viewed.part, viewed.part_version
            return target
        if functional is None:
            raise NoTorchRule(func, "has no running-error rule: take the function that returns a new tensor")
        self.store(target, self.call(functional, args, kwargs))
        return target

    def store(self, target: BoundedTensor, result: Any) -> None:
        """Replace the elements of a tensor."""
        memory, number = target.memory, self.unwrap(result)
        if isinstance(memory.payload, Whole):
            raise HangsOnRounding("an integer depends on rounding errors, and is written into")
        comparison = isinstance(memory.payload, Comparison)
        item = as_comparison(number) if comparison else lift(number, self.dtype.arithmetic)
        item = item.rearrange(lambda part: np.broadcast_to(part, target.shape))
        place = (tuple(target.shape), target.stride(), int(target.storage_offset()))
        copy = memory.payload.rearrange(np.copy)
        view = copy.rearrange(lambda part: strided_view(part, *place))
        if isinstance(view, Bounded):
            view[...] = item
        else:
            view.outcome[...], view.uncertain[...] = item.outcome, item.uncertain
        memory.payload, memory.version, memory.note = copy, memory.version + 1, None


# Arguments that do not affect the values.
UNUSED = {"layout", "device", "pin_memory", "memory_format", "non_blocking", "requires_grad", "dtype"}


def as_comparison(value: Any) -> Comparison:
    """Return a tensor of bool as a `Comparison`."""
    if isinstance(value, Comparison):
        return value
    outcome = np.asarray(value, dtype=bool)
    return Comparison(outcome, np.zeros_like(outcome), arithmetic())


def plain(argument: Any) -> Any:
    """Return tensors of bool or indices, which select elements, as plain tensors.

    Raises:
        HangsOnRounding: a selection depends on rounding.
    """
    if isinstance(argument, BoundedTensor) and not argument.dtype.is_floating_point:
        payload = argument.payload
        if isinstance(payload, Whole):
            raise HangsOnRounding("an integer depends on rounding errors, and decides what is computed")
        return torch.from_numpy(np.array(certain(payload) if isinstance(payload, Comparison) else payload.certain()))
    return [plain(part) for part in argument] if isinstance(argument, list | tuple) else argument
