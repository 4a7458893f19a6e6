"""Infer the declaration of an operation from a function and inputs to call it with."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fourfold.declaration.definition import DefinedOperation, operation, signature_of
from fourfold.numerics.dtypes import INTEGERS, QUANTISED, name_of
from fourfold.operations.arguments import TensorInput, Values, tensor, values

# The most elements of an input. With more, the reference takes minutes a case.
MOST_ELEMENTS = 1 << 22


def like(
    definition: Callable[..., torch.Tensor],
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    vary: bool = False,
    name: str | None = None,
    **fields: Any,
) -> DefinedOperation:
    """Return the operation of a torch function, declared by an example call.

    Args:
        definition: the function that defines the right results.
        inputs: the arguments of a call, in order or by name. The integers of a tensor stay between its smallest and its
            largest one. Other arguments keep their values.
        vary: whether sizes are drawn. Axes of equal size in the call then have equal sizes in every case. Otherwise
            every case has the sizes of the call.
        name: the operation's name. The default is the function's name.
        **fields: fields of the operation: see `fourfold.operation`.

    Raises:
        ValueError: an input has a dtype that cannot be drawn, or is too large.
        TypeError: the function does not accept the inputs.
    """
    signature = signature_of(definition)
    bound = signature.bind(**inputs) if isinstance(inputs, Mapping) else signature.bind(*inputs)
    tensors = [value for value in bound.arguments.values() if isinstance(value, torch.Tensor)]
    lengths = sorted({size for value in tensors for size in value.shape if size > 1})
    arguments: dict[str, Any] = {
        argument: _infer(argument, value, lengths if vary else []) for argument, value in bound.arguments.items()
    }

    @functools.wraps(definition)
    def defined(*args: Any, **kwargs: Any) -> torch.Tensor:
        return definition(*args, **kwargs)

    defined.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p for p in signature.parameters.values() if p.name in arguments]
    )
    defined.__name__ = name or str(getattr(definition, "__name__", "reference"))
    sizes = {} if vary else {_axis(size): size for size in lengths}
    # The user did not write the definition, so the verdict reports an operator without an error bound, not this call.
    return operation(sizes=sizes, tried=False, **arguments, **fields)(defined)


def _axis(size: int) -> str:
    return f"of_{size}" if size > 1 else str(size)


def _infer(argument: str, value: Any, lengths: Sequence[int]) -> TensorInput | Values:
    """Return the declaration of an argument. Integers below a varying length count as indices into its axis."""
    if not isinstance(value, torch.Tensor):
        return values(value)
    if value.numel() > MOST_ELEMENTS:
        raise ValueError(f"{argument} has {value.numel()} elements: a reference takes at most {MOST_ELEMENTS}")
    axes = " ".join(map(_axis, value.shape))
    if value.is_floating_point():
        return tensor(axes, dtype=value.dtype if name_of(value.dtype) in QUANTISED else None)
    if value.dtype == torch.bool:
        return tensor(axes, dtype="bool")
    if name_of(value.dtype) not in INTEGERS:
        raise ValueError(f"{argument} has dtype {value.dtype}, which cannot be drawn")
    low, high = (int(value.min()), int(value.max()) + 1) if value.numel() else (0, 1)
    axis = next((length for length in lengths if length >= high and low >= 0), None)
    return tensor(axes, dtype=value.dtype, low=low if axis is None else 0, high=_axis(axis) if axis else high)
