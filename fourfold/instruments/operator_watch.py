"""Dispatch modes that see torch's operators during a call, including those inside of custom operators."""

from collections.abc import Iterator
from typing import Any, Self

import torch

from fourfold.compat import torch_internals

_ATEN = torch.ops.aten
# Operators that allocate: these leave the memory unwritten, the next ones write it.
UNWRITTEN = {
    *(_ATEN.empty, _ATEN.empty_like, _ATEN.empty_permuted, _ATEN.empty_strided),
    *(_ATEN.new_empty, _ATEN.new_empty_strided),
}
WRITTEN = {
    *(_ATEN.zeros, _ATEN.zeros_like, _ATEN.new_zeros, _ATEN.ones, _ATEN.ones_like, _ATEN.new_ones),
    *(_ATEN.full, _ATEN.full_like, _ATEN.new_full, _ATEN.clone),
}
# All of these, and further operators that move or set values and compute nothing.
MEMORY = UNWRITTEN | WRITTEN
MEMORY |= {_ATEN.zero_, _ATEN.fill, _ATEN.fill_, _ATEN.scalar_tensor, _ATEN.copy, _ATEN.copy_}
MEMORY |= {_ATEN.contiguous, _ATEN.set_, _ATEN.resize_, _ATEN.cat, _ATEN.stack, _ATEN.constant_pad_nd}
MEMORY |= {_ATEN.detach, _ATEN.alias, *torch_internals.copying_operators()}
_DispatchMode: Any = torch_internals.dispatch_mode()


def iter_tensors(*values: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in an operator's arguments or results: its schema knows lists, tuples and dictionaries."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from iter_tensors(*value.values())
        elif isinstance(value, list | tuple):
            yield from iter_tensors(*value)


# The active modes, the innermost last. A call in another process needs a mode of the same kind there.
ENTERED: "list[InsideOperators]" = []


class InsideOperators(_DispatchMode):
    """A dispatch mode that sees torch's own operators, also those that a custom operator calls.

    A subclass overrides `aten`.
    """

    def __enter__(self) -> Self:
        ENTERED.append(self)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        ENTERED.pop()
        super().__exit__(*raised)

    def aten(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call one of torch's own operators; return its result."""
        return operator(*args, **kwargs)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch_internals.namespace(operator) in ("aten", "prim", "prims", "profiler"):
            return self.aten(operator, args, kwargs or {})
        # torch turns the mode off inside of an operator that it sees. Turn it on for what a kernel allocates and calls.
        first = next(iter_tensors(args, kwargs), None)
        with self:
            device_type = "cpu" if first is None else first.device.type
            return torch_internals.run_kernel(operator, device_type, args, kwargs or {})


class Fallbacks(InsideOperators):
    """A context that notes in `operators` every torch operator that computes on floating-point tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: dict[str, None] = {}

    def aten(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Note the operator, unless it only moves values within a device."""
        result = operator(*args, **kwargs)
        tensors = list(iter_tensors(args, kwargs, result))
        name = torch_internals.overload_packet(operator)
        if name in MEMORY or torch_internals.is_view(operator):
            devices = {x.device.type for x in tensors if x.numel() > 1}
            if len(devices) > 1:
                self.operators[f"{name}, to another device"] = None
        elif any(x.is_floating_point() or x.is_complex() for x in tensors):
            self.operators[str(name)] = None
        return result
