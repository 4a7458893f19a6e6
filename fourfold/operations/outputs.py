"""Adapt functions to those that return one output.

A function with several outputs becomes one that returns an output alone, or all of them in a row. A function that works
in place becomes one that returns what it has written.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
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
    is_sequence = isinstance(result, tuple | list)
    if is_sequence and len(result) == len(names) and all(isinstance(tensor, torch.Tensor) for tensor in result):
        return result
    kinds = [type(value).__name__ for value in result] if is_sequence else type(result).__name__
    raise WrongOutputs(f"{' and '.join(names)} must be returned as {len(names)} tensors in a tuple, not {kinds}")


def alone(function: Callable[..., Any], names: Sequence[str], place: int) -> Callable[..., torch.Tensor]:
    """Return a function that returns one output of another function.

    Args:
        function: the function, which returns a tuple of tensors.
        names: the names of the outputs.
        place: the index of the output to return.
    """

    @functools.wraps(function)
    def select(*arguments: Any, **keywords: Any) -> torch.Tensor:
        return outputs_of(function(*arguments, **keywords), names)[place]

    # A function that runs in another process makes calls from several threads there.
    at_once = getattr(function, "call_at_once", None)
    if at_once is not None:
        select.call_at_once = functools.partial(at_once, output=(names, place))  # type: ignore[attr-defined]
        select.compare_sizes = function.compare_sizes  # type: ignore[attr-defined]
    return select


def list_of(name: str) -> str:
    """Return the name of the list that holds a tensor such as ``xs[0]``; any other name as it is."""
    return name.partition("[")[0]


# Marks a function from `pack_lists`, and those that are made of it.
TAKES_ITEMS = "fourfold_takes_items"


def pack_lists(function: Callable[..., Any], lists: Sequence[str]) -> Callable[..., Any]:
    """Return a function that takes the tensors of lists one by one, by names such as ``xs[0]``.

    Args:
        function: a function of arguments by name, some of them lists of tensors.
        lists: the names of these. A tensor that is None is not in its list.

    Returns:
        the function itself if there are no lists, or if it takes their tensors one by one.
    """
    if not lists or getattr(function, TAKES_ITEMS, False):
        return function

    @functools.wraps(function)
    def pack(*positional: Any, **arguments: Any) -> Any:
        packed: dict[str, Any] = {name: [] for name in lists if name not in arguments and not positional}
        for name, value in arguments.items():
            if list_of(name) not in lists or name in lists:
                packed[name] = value
            elif value is not None:
                packed[list_of(name)].append(value)
        return function(*positional, **packed)

    setattr(pack, TAKES_ITEMS, True)
    _forget_other_calls(pack)
    return pack


def _forget_other_calls(wrapper: Any) -> None:
    """Drop the ways to make calls from several threads, and observed ones, in the process of the wrapped function."""
    for name in ("call_at_once", "compare_sizes"):
        wrapper.__dict__.pop(name, None)


def _present(names: Sequence[str], arguments: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the tensors of a call that belong to each of some arguments, which may be lists."""
    present = [name for name, value in arguments.items() if value is not None]
    return {name: [argument for argument in present if name in (argument, list_of(argument))] for name in names}


def _join(name: str, tensors: Mapping[str, torch.Tensor], empty: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tensor of an argument, or those of a list one after another, flattened; `empty` for none."""
    if name in tensors:
        return tensors[name]
    flat = [tensor.reshape(-1) for tensor in tensors.values()]
    return torch.cat(flat) if flat else torch.empty(0) if empty is None else empty


def functional(
    definition: Callable[..., Any], mutates: Sequence[str], outputs: Sequence[str]
) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
    """Return a definition that returns the new values of arguments, which the given one may change in place.

    Args:
        definition: a function that changes tensors of the call, or returns their new values first.
        mutates: the names of these tensors.
        outputs: the names of what it returns beside them.

    Returns:
        a function of the same arguments by name, which it leaves unchanged. It returns the new values and the other
        outputs, in a tuple if there are several.

    Raises:
        WrongOutputs: when called, if the definition returns another number of tensors.
        ValueError: when called, if a new value has another shape than its argument.
    """

    @functools.wraps(definition)
    def call(**arguments: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        present = _present(mutates, arguments)
        copies = {name: arguments[name].clone() for names in present.values() for name in names}
        returned = _tensors(definition(**{**arguments, **copies}))
        if len(returned) != len(copies) + len(outputs):
            further = [value for value in returned if not any(value is tensor for tensor in copies.values())]
            if len(further) != len(outputs):
                expected = " and ".join(outputs) or "nothing"
                raise WrongOutputs(
                    f"a definition that mutates {' and '.join(mutates)} must return {expected}, or the new values"
                    f" before that, not {len(returned)} tensors"
                )
            returned = (*copies.values(), *further)
        for name, new in zip(copies, returned):
            if new.shape != arguments[name].shape:
                raise ValueError(
                    f"{name} has shape {list(arguments[name].shape)}, and its new value has {list(new.shape)}"
                )
        new = dict(zip(copies, returned))
        results = [_join(name, {n: new[n] for n in names}) for name, names in present.items()]
        results += returned[len(copies) :]
        return tuple(results) if len(results) > 1 else results[0]

    return call


def _tensors(result: Any) -> tuple[Any, ...]:
    """Return what a function returns as a tuple, with the tensors of lists one after another."""
    if result is None:
        return ()
    if not isinstance(result, tuple | list):
        return (result,)
    return tuple(tensor for item in result for tensor in (item if isinstance(item, tuple | list) else (item,)))


# Marks a function from `read_back`, and those that are made of it.
READS_BACK = "fourfold_reads_back"


def read_back(
    function: Callable[..., Any],
    mutates: Sequence[str],
    outputs: Sequence[str],
    empty: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
    """Return a function that returns what another one has written into its arguments.

    The arguments have their former values again when it returns. What the other function returns must be the tensors
    that it changes, or nothing, and `outputs`.

    Args:
        function: a function that changes tensors of the call.
        mutates: the names of these tensors.
        outputs: the names of what it returns beside them.
        empty: a tensor without elements for each list among them, to return for a list without tensors.

    Returns:
        a function of the same arguments by name. It returns copies of the changed tensors and the other outputs, in a
        tuple if there are several. The tensors of a list are flattened and joined.

    Raises:
        WrongOutputs: when called, if the function returns other tensors.
    """

    @functools.wraps(function)
    def call(**arguments: Any) -> Any:
        present = _present(mutates, arguments)
        mutated = [name for names in present.values() for name in names]
        if not all(present[name] or name in empty for name in mutates) or not all(
            isinstance(arguments[name], torch.Tensor) for name in mutated
        ):
            return function(**arguments)  # bad input
        compiling = torch.compiler.is_compiling()  # torch.compile of torch 2.11 compares no addresses
        # The memory of the arguments, even if the function exchanges that of the tensors.
        memory = {name: arguments[name].detach() for name in mutated}
        former = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in memory.items()}
        try:
            tensors = {name: arguments[name] for name in mutated}
            returned = _tensors(function(**arguments))
            for name, tensor in tensors.items():
                if not compiling and not _is_same(tensor, memory[name]):
                    raise WrongOutputs(f"the call gives {name} other memory, instead of writing into its own")
            extra = [value for value in returned if not any(value is tensor for tensor in tensors.values())]
            same = [e for e in extra if not compiling and any(_is_same(e, m) for m in memory.values())]
            for e in same:
                if len(extra) > len(outputs):  # empty tensors all lie at one place
                    extra = [other for other in extra if other is not e]
            if len(extra) != len(outputs) or not all(isinstance(e, torch.Tensor) for e in extra):
                raise WrongOutputs(_other_return(extra, mutates, outputs))
            new = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in memory.items()}
            results = [_join(name, {n: new[n] for n in names}, empty.get(name)) for name, names in present.items()]
        finally:
            for name, tensor in memory.items():
                tensor.copy_(former[name])
        return (*results, *extra) if len(results) + len(extra) > 1 else results[0]

    setattr(call, READS_BACK, True)
    _forget_other_calls(call)
    return call


def _is_same(value: Any, tensor: torch.Tensor) -> bool:
    """Return whether a returned object is a tensor with the elements of another one, in the same memory."""
    if not isinstance(value, torch.Tensor) or value.dtype != tensor.dtype:
        return False
    return (value.shape, value.stride(), value.data_ptr()) == (tensor.shape, tensor.stride(), tensor.data_ptr())


def _other_return(values: Sequence[Any], mutates: Sequence[str], outputs: Sequence[str]) -> str:
    """Return the message for a function that returns other objects than it may."""
    mutated = " and ".join(mutates)
    kinds = ", ".join("a new tensor" if isinstance(value, torch.Tensor) else type(value).__name__ for value in values)
    either = " and ".join(outputs) or "nothing", " and ".join([mutated, *outputs])
    return f"the call changes {mutated} in place, and must return {' or '.join(either)}, not {kinds or 'nothing'}"


def concatenate_outputs(
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
    def row(*arguments: Any, **keywords: Any) -> torch.Tensor:
        outputs = outputs_of(function(*arguments, **keywords), names)
        return row_of([outputs[place] for place in places], dtype)

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
        row = torch.cat([*outputs], dim=-1)
    else:
        row = torch.cat([output.reshape(-1) for output in outputs])
    return row if dtype is None else row.to(dtype)


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
