"""Integers and truth values that rounding may change, and the results that a definition chooses among few numbers.

A count of comparisons, a number that is cast to integers or the index of the largest number may depend on rounding. Its
tensor then carries the integers that may be, as `Whole`, or the `Places` at which numbers were found. Operators on such
tensors are evaluated for each of the integers that may be.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fourfold.numerics.bounded import Bounded, Comparison, OneOf
from fourfold.numerics.torch_adapter.tensors import (
    INTEGERS,
    BoundedTensor,
    Evaluation,
    Whole,
    index_places,
    iter_tensors,
    plain,
)

Array = np.ndarray

# Operators whose elements depend on one element of each operand, and lie between those of the operands' ends.
BETWEEN = {
    *("add", "sub", "rsub", "mul", "neg", "abs", "sign", "where", "masked_fill", "minimum", "maximum", "clamp"),
    *("clamp_min", "clamp_max", "bitwise_not", "_to_copy", "__lshift__", "__rshift__"),
    *("bitwise_left_shift", "bitwise_right_shift", "div", "floor_divide"),
}
# The same, where integers between the ends may give any result.
ANYWHERE = {"bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__", "remainder", "fmod"}
# Operators that never decrease if an element of an operand increases.
MONOTONIC = {"sum", "cumsum", "amax", "amin", "max", "min"}
# The most operands that rounding may change.
MOST_OPERANDS = 4


def evaluate_integers(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator on integers that rounding may change; `NotImplemented` if it has no integers.

    Raises:
        HangsOnRounding: more than the values of the result depends on rounding.
    """
    exact = func(*exactly(args), **kwargs)
    if any(result.is_floating_point() or result.dtype == torch.bool for result in iter_tensors([exact])):
        return NotImplemented
    operator = str(func).split(".")[1]
    tensors = [tensor for tensor in iter_tensors((*args, *kwargs.values())) if isinstance(tensor, BoundedTensor)]
    operators = BETWEEN | ANYWHERE | MONOTONIC
    if operator not in operators or any(map(index_places, tensors)) or len(tensors) > MOST_OPERANDS:
        return func(*map(plain, args), **kwargs)
    operands = [whole_of(tensor.payload) for tensor in tensors]
    choices = [*itertools.product(("low", "outcome", "high"), repeat=len(operands))]
    if operator in MONOTONIC:
        choices = [("low",) * len(operands), ("high",) * len(operands)]
    results = [exact.numpy()]
    for choice in choices:
        ends = iter([_cut(getattr(x, e), tensor.dtype) for x, e, tensor in zip(operands, choice, tensors)])
        results.append(func(*[_replace_chosen(argument, ends) for argument in args], **kwargs).numpy())
    low, high = (end(np.stack(results).astype(np.float64), axis=0) for end in (np.min, np.max))
    unknown: Array = np.zeros(low.shape, dtype=bool)
    for x in operands:
        is_unbounded = np.isinf(x.low)
        if operator in ANYWHERE:
            # The ends and the middle are all integers that may be.
            is_unbounded = is_unbounded | (x.high - x.outcome > 1) | (x.outcome - x.low > 1)
        unknown |= is_unbounded.any() if operator in MONOTONIC else np.broadcast_to(is_unbounded, low.shape)
    low, high = np.where(unknown, -np.inf, low), np.where(unknown, np.inf, high)
    return integers_of(evaluation, Whole(exact.numpy().astype(np.float64), low, high), exact.dtype)


INTEGERS.append(evaluate_integers)


def exactly(argument: Any) -> Any:
    """Return an argument of an operator with the integers of the exact numbers, as plain tensors."""
    if isinstance(argument, BoundedTensor):
        return torch.from_numpy(np.array(argument.payload.outcome, dtype=np.float64)).to(argument.dtype)
    return type(argument)(map(exactly, argument)) if isinstance(argument, list | tuple) else argument


def _replace_chosen(argument: Any, ends: Iterator[torch.Tensor]) -> Any:
    """Return an argument with the next of other tensors in place of each that rounding may change."""
    if isinstance(argument, BoundedTensor):
        return next(ends)
    return [_replace_chosen(item, ends) for item in argument] if isinstance(argument, list | tuple) else argument


def _cut(numbers: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return whole numbers as a tensor; those past the ends of the dtype are the ends."""
    low, high = (0.0, 1.0) if dtype == torch.bool else limits(dtype)
    return torch.from_numpy(np.clip(np.nan_to_num(numbers), low, high)).to(dtype)


def limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return the least and the largest integer of a dtype that a float64 can hold, too."""
    info = torch.iinfo(dtype)
    return float(info.min), float(np.nextafter(2.0**63, 0)) if dtype == torch.int64 else float(info.max)


def whole_of(payload: Whole | Comparison | Array) -> Whole:
    """Return integers, or truth values as ones and zeros, with the least and the largest that may be."""
    if isinstance(payload, Whole):
        return payload
    if isinstance(payload, Comparison):
        outcome = payload.outcome.astype(np.float64)
        return Whole(outcome, np.where(payload.uncertain, 0, outcome), np.where(payload.uncertain, 1, outcome))
    number = payload.astype(np.float64)
    return Whole(number, number, number)


def integers_of(evaluation: Evaluation, numbers: Whole, dtype: torch.dtype) -> torch.Tensor:
    """Return integers as a tensor: a plain one if rounding may change none."""
    if np.array_equal(numbers.low, numbers.high):
        return torch.from_numpy(np.array(numbers.outcome, dtype=np.float64)).to(dtype)
    return evaluation.wrap(numbers, dtype)


def truncate(payload: Bounded, dtype: torch.dtype) -> Whole:
    """Return numbers cast to integers, towards 0.

    Nothing is known of NaN and of numbers past the ends of the dtype: a cast differs between devices there.
    """
    error = np.where(payload.terms.exact(payload.arithmetic), 0.0, payload.error)
    low, value, high = (np.trunc(payload.value + sign * error) for sign in (-1, 0, 1))
    smallest, largest = limits(dtype)
    overflows = ~((low >= smallest) & (high <= largest))
    return Whole(np.where(overflows, 0, value), np.where(overflows, -np.inf, low), np.where(overflows, np.inf, high))


def chosen_result(tensor: torch.Tensor, evaluation: Evaluation) -> Bounded:
    """Return the values of a tensor of integers, booleans or quantised numbers, which no kernel rounds further.

    Where rounding decides, each of the values that it may decide for is right.
    """
    arithmetic = evaluation.dtype.arithmetic
    places = index_places(tensor)
    if places is not None:
        return OneOf(places.outcome.astype(np.float64), arithmetic, places.nearest)
    if isinstance(tensor, BoundedTensor):
        payload = tensor.payload
        if isinstance(payload, Bounded):
            return OneOf(payload.value, arithmetic).within(payload.error)
        numbers = whole_of(payload)

        def nearest(actual: Array) -> Array:
            return np.clip(actual, numbers.low, numbers.high)

        return OneOf(numbers.outcome, arithmetic, nearest).within(np.where(np.isinf(numbers.low), np.inf, 0.0))
    if tensor.is_floating_point():
        tensor = tensor.double()
    wide = np.longdouble if tensor.dtype == torch.int64 else np.float64
    return OneOf(tensor.numpy().astype(wide), arithmetic)
