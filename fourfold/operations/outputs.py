"""Functions that return several outputs, as functions that return one: an output alone, or all of them in a row."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fourfold.operations.refusals import Fault


class WrongOutputs(Fault, TypeError):
    """A function does not return as many tensors as are named."""


def outputs_of(result: Any, names: Sequence[str]) -> Sequence[torch.Tensor]:
    """The outputs of a call.

    Raises:
        WrongOutputs: it did not return one tensor for each of the names.
    """
    several = isinstance(result, tuple | list)
    if several and len(result) == len(names) and all(isinstance(each, torch.Tensor) for each in result):
        return result
    returned = [type(each).__name__ for each in result] if several else type(result).__name__
    raise WrongOutputs(f"{' and '.join(names)} must be returned as {len(names)} tensors in a tuple, not {returned}")


def alone(function: Callable[..., Any], names: Sequence[str], place: int) -> Callable[..., torch.Tensor]:
    """A function that returns one of the outputs of another function.

    Args:
        function: returns a tuple of tensors.
        names: what they are called.
        place: which one is returned.
    """

    @functools.wraps(function)
    def one(*arguments: Any, **named: Any) -> torch.Tensor:
        return outputs_of(function(*arguments, **named), names)[place]

    # A function of another process makes calls by several threads at once there.
    at_once = getattr(function, "called_at_once", None)
    if at_once is not None:
        one.called_at_once = functools.partial(at_once, output=(names, place))  # type: ignore[attr-defined]
        one.compared = function.compared  # type: ignore[attr-defined]
    return one


def in_a_row(
    function: Callable[..., Any], names: Sequence[str], places: Sequence[int], dtype: torch.dtype | None = None
) -> Callable[..., torch.Tensor]:
    """A function that returns outputs of another function one after another, as `row_of` joins them.

    So one cotangent, whose elements are random, has a part for each of the outputs. One output alone is returned as it
    is.

    Args:
        function: returns a tuple of tensors.
        names: what they are called.
        places: which ones are returned.
        dtype: that of the result; unless given, what torch promotes the outputs to.
    """

    @functools.wraps(function)
    def row(*arguments: Any, **named: Any) -> torch.Tensor:
        found = outputs_of(function(*arguments, **named), names)
        return row_of([found[place] for place in places], dtype)

    return row


def row_of(outputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Outputs one after another; one output alone as it is.

    Those of one shape lie side by side along the last axis, so that a row of the result has a row of each. All others
    are joined element by element, along one axis.

    Args:
        outputs: one at least.
        dtype: that of the result; unless given, what torch promotes the outputs to.
    """
    if len(outputs) == 1:
        return outputs[0]
    if side_by_side([output.shape for output in outputs]):
        joined = torch.cat([*outputs], dim=-1)
    else:
        joined = torch.cat([output.reshape(-1) for output in outputs])
    return joined if dtype is None else joined.to(dtype)


def side_by_side(shapes: Sequence[Sequence[int]]) -> bool:
    """Whether outputs of these shapes are joined along their last axis: all have one shape, of an axis at least."""
    return bool(shapes[0]) and all(shape == shapes[0] for shape in shapes)


def parts_of(row: torch.Tensor, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What `row_of` these outputs would join to `row`, such as the cotangent of each: contiguous, in their dtypes."""
    if len(outputs) == 1:
        return [row]
    if side_by_side([output.shape for output in outputs]):
        parts = row.split([output.shape[-1] for output in outputs], -1)
    else:
        parts = row.split([output.numel() for output in outputs])
    return [part.reshape(output.shape).to(output.dtype).contiguous() for part, output in zip(parts, outputs)]
