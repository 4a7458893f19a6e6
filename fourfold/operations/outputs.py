"""Adapt functions with several outputs to functions with one: an output alone, or all outputs in a row."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fourfold.operations.refusals import Fault


class WrongOutputs(Fault, TypeError):
    """An error for a function that does not return one tensor for each name."""


def outputs_of(result: Any, names: Sequence[str]) -> Sequence[torch.Tensor]:
    """Return the outputs of a call.

    Raises:
        WrongOutputs: the call did not return one tensor for each name.
    """
    several = isinstance(result, tuple | list)
    if several and len(result) == len(names) and all(isinstance(each, torch.Tensor) for each in result):
        return result
    returned = [type(each).__name__ for each in result] if several else type(result).__name__
    raise WrongOutputs(f"{' and '.join(names)} must be returned as {len(names)} tensors in a tuple, not {returned}")


def alone(function: Callable[..., Any], names: Sequence[str], place: int) -> Callable[..., torch.Tensor]:
    """Return a function that returns one output of another function.

    Args:
        function: the function, which returns a tuple of tensors.
        names: the names of the outputs.
        place: the index of the output to return.
    """

    @functools.wraps(function)
    def one(*arguments: Any, **named: Any) -> torch.Tensor:
        return outputs_of(function(*arguments, **named), names)[place]

    # A function that runs in another process makes calls from several threads there.
    at_once = getattr(function, "called_at_once", None)
    if at_once is not None:
        one.called_at_once = functools.partial(at_once, output=(names, place))  # type: ignore[attr-defined]
        one.compared = function.compared  # type: ignore[attr-defined]
    return one


def in_a_row(
    function: Callable[..., Any], names: Sequence[str], places: Sequence[int], dtype: torch.dtype | None = None
) -> Callable[..., torch.Tensor]:
    """Return a function that joins outputs of another function by `row_of`.

    A single random cotangent then has a part for each output. A single output is returned unchanged.

    Args:
        function: the function, which returns a tuple of tensors.
        names: the names of the outputs.
        places: the indices of the outputs to join.
        dtype: the dtype of the result; unless given, the dtype to which torch promotes the outputs.
    """

    @functools.wraps(function)
    def row(*arguments: Any, **named: Any) -> torch.Tensor:
        found = outputs_of(function(*arguments, **named), names)
        return row_of([found[place] for place in places], dtype)

    return row


def row_of(outputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return outputs joined into one tensor; a single output unchanged.

    Outputs of equal shapes are joined along the last axis, so that a row of the result holds a row of each. Others are
    flattened and joined along one axis.

    Args:
        outputs: at least one output.
        dtype: the dtype of the result; unless given, the dtype to which torch promotes the outputs.
    """
    if len(outputs) == 1:
        return outputs[0]
    if side_by_side([output.shape for output in outputs]):
        joined = torch.cat([*outputs], dim=-1)
    else:
        joined = torch.cat([output.reshape(-1) for output in outputs])
    return joined if dtype is None else joined.to(dtype)


def side_by_side(shapes: Sequence[Sequence[int]]) -> bool:
    """Return whether outputs are joined along their last axis: all have the same shape, of at least one axis."""
    return bool(shapes[0]) and all(shape == shapes[0] for shape in shapes)


def parts_of(row: torch.Tensor, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split a row, a cotangent for example, into parts for outputs joined by `row_of`: contiguous, in their dtypes."""
    if len(outputs) == 1:
        return [row]
    if side_by_side([output.shape for output in outputs]):
        parts = row.split([output.shape[-1] for output in outputs], -1)
    else:
        parts = row.split([output.numel() for output in outputs])
    return [part.reshape(output.shape).to(output.dtype).contiguous() for part, output in zip(parts, outputs)]
