"""Accept what earlier releases of Triton accepted, so that scripts written for one of them run.

- Block pointers, which version 3.8 has removed: see `block_pointers`.
- ``p = (x_ptr + offsets, )``. Up to version 3.1 the compiler assigned a tuple of one value as the value itself.
- Calls of libdevice with types that the library lacks, such as ``pow(2.0, i)`` with `i` of int16. They were converted
  to a common type, as the operands of a sum are.
"""

import ast
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl

from fourfold.backends.triton.interpreter import block_pointers
from fourfold.backends.triton.interpreter.source import KernelSource

# The functions whose first argument is a pointer.
ACCESSES = ("load", "store", "atomic_")


class EarlierSource(KernelSource):
    """The changes of `KernelSource`, after those for earlier releases."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Change a whole source."""
        accesses = [call for call in ast.walk(node) if isinstance(call, ast.Call) and _is_access(call.func)]
        pointers = {call.args[0].id for call in accesses if call.args and isinstance(call.args[0], ast.Name)}
        for assignment in ast.walk(node):
            if isinstance(assignment, ast.Assign) and isinstance(assignment.value, ast.Tuple):
                names = {target.id if isinstance(target, ast.Name) else "" for target in assignment.targets}
                if len(assignment.value.elts) == 1 and names <= pointers:
                    assignment.value = assignment.value.elts[0]
        return super().visit_Module(node)


def _is_access(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr.startswith(ACCESSES)


def _converting(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `extern_elementwise` that converts arguments to a type of the library."""

    def call(name: str, path: str, args: list[Any], symbols: dict, is_pure: bool, _semantic: Any = None) -> Any:
        tensors = [_semantic.to_tensor(argument) for argument in args]
        if tuple(argument.dtype for argument in tensors) not in symbols:
            common = tensors[0]
            for argument in tensors:
                common = _semantic.binary_op_type_checking_impl(argument, common)[1]
            tensors = [_semantic.binary_op_type_checking_impl(argument, common)[0] for argument in tensors]
        return shipped(name, path, tensors, symbols, is_pure, _semantic=_semantic)

    return call


@contextlib.contextmanager
def supply() -> Iterator[None]:
    """Let kernels use what earlier releases had, during a launch."""
    shipped = tl.core.extern_elementwise
    tl.core.extern_elementwise = _converting(shipped)
    try:
        with block_pointers.supply():
            yield
    finally:
        tl.core.extern_elementwise = shipped
