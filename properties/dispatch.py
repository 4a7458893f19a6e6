"""What goes through torch's dispatcher during a call, that within custom operators included."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
# Operators that allocate.
UNWRITTEN = {
    *(_ATEN.empty, _ATEN.empty_like, _ATEN.empty_permuted, _ATEN.empty_strided),
    *(_ATEN.new_empty, _ATEN.new_empty_strided),
}
WRITTEN = {
    *(_ATEN.zeros, _ATEN.zeros_like, _ATEN.new_zeros, _ATEN.ones, _ATEN.ones_like, _ATEN.new_ones),
    *(_ATEN.full, _ATEN.full_like, _ATEN.new_full, _ATEN.clone),
}
# And those besides that move or set values, and compute nothing.
MEMORY = UNWRITTEN | WRITTEN
MEMORY |= {_ATEN.zero_, _ATEN.fill, _ATEN.fill_, _ATEN.scalar_tensor, _ATEN.copy, _ATEN.copy_, _ATEN._to_copy}
MEMORY |= {_ATEN.contiguous, _ATEN.set_, _ATEN.resize_, _ATEN.cat, _ATEN.stack, _ATEN.constant_pad_nd}
MEMORY |= {_ATEN._local_scalar_dense, _ATEN._reshape_copy, _ATEN._unsafe_view, _ATEN.detach, _ATEN.alias}


class InsideOperators(TorchDispatchMode):
    """A dispatch mode that sees torch's own operators, also those that a custom operator calls.

    A subclass overrides `aten`.
    """

    def aten(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """One of torch's own operators is called; gives its result."""
        return operator(*args, **kwargs)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator.namespace in ("aten", "prim", "prims", "profiler"):
            return self.aten(operator, args, kwargs or {})
        # The mode is off within the operators that it sees: on again for what a kernel allocates, and calls.
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        key = getattr(torch._C.DispatchKey, tensors[0].device.type.upper() if tensors else "CPU")
        with self:
            return operator.redispatch(torch._C.DispatchKeySet(key), *args, **(kwargs or {}))


class Fallbacks(InsideOperators):
    """Within it, whatever of torch computes on floating-point tensors is noted in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def aten(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Note the operator, unless it but moves values."""
        result = operator(*args, **kwargs)
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if operator.overloadpacket in MEMORY or operator.is_view:
            devices = {x.device.type for x in tensors if x.numel() > 1}
            if len(devices) > 1:
                self.found[f"{operator.overloadpacket}, to another device"] = None
        elif any(x.is_floating_point() or x.is_complex() for x in tensors):
            self.found[str(operator.overloadpacket)] = None
        return result
