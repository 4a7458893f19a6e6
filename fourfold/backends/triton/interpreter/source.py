"""Change a kernel's source so that it has the compiler's meaning.

To Python a block is true, so that ``a and b`` of two blocks is the right one. To the compiler it is true in those
elements where both are.
"""

import ast
import itertools
import math
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from fourfold.backends import observers
from fourfold.backends.triton.interpreter.batches import largest, least, loop

# Of the names that a changed source uses. Triton adds the names of its interpreter's module to those of the kernel's.
PREFIX = "_fourfold_"


class KernelSource(interpreter.ASTTransformer):
    """Triton's own changes of a function's source, preceded by those of this module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Change a whole source."""
        for conditional, *numbers in observers.conditional_parts(node):
            conditional.parts = numbers  # type: ignore[attr-defined]  # for `marks`
        logic = _Logic(not hasattr(interpreter.ASTTransformer, "visit_Compare"))
        for function in node.body:
            if isinstance(function, ast.FunctionDef):
                function.body = [logic.visit(statement) for statement in function.body]
        return super().generic_visit(node)


class _Logic(ast.NodeTransformer):
    """Replaces Python's logic by calls of the functions below.

    Args:
        single_comparisons: whether to reject ``a < b < c``. Triton 3.6 does not compile it, and its interpreter gives
            ``b < c``.
    """

    def __init__(self, single_comparisons: bool) -> None:
        self.single_comparisons = single_comparisons
        self.names = (f"{PREFIX}operand_{number}" for number in itertools.count())

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Replace ``a and b`` by ``logical_and(t, b) if undecided_and(t := a) else t``."""
        self.generic_visit(node)
        word = "and" if isinstance(node.op, ast.And) else "or"
        left, *others = node.values
        for right in others:
            name = next(self.names)
            assigned = ast.NamedExpr(target=ast.Name(id=name, ctx=ast.Store()), value=left)
            both = _call(f"logical_{word}", ast.Name(id=name, ctx=ast.Load()), right)
            left = ast.IfExp(_call(f"undecided_{word}", assigned), both, ast.Name(id=name, ctx=ast.Load()))
        return ast.copy_location(left, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """Replace ``not a``."""
        self.generic_visit(node)
        return ast.copy_location(_call("logical_not", node.operand), node) if isinstance(node.op, ast.Not) else node

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> ast.AST:
        """Replace the condition of ``if a`` and ``while a``."""
        self.generic_visit(node)
        node.test = ast.copy_location(_call("condition", node.test), node.test)
        return node

    visit_IfExp = visit_While = visit_If

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace ``range(a)`` by ``batch_replacement(range)(a)``, and likewise ``min`` and ``max``."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("range", "min", "max"):
            node.func = ast.copy_location(_call("batch_replacement", node.func), node.func)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Reject ``a < b < c`` if `single_comparisons`."""
        if len(node.ops) > 1 and self.single_comparisons:
            raise NotImplementedError(f"this release of Triton compiles no chain of comparisons: {ast.unparse(node)}")
        return self.generic_visit(node)


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(id=PREFIX + function, ctx=ast.Load()), list(arguments), [])


def undecided_and(left: Any) -> bool:
    """Return whether ``left and right`` depends on right. If left is a value of the kernel, it does."""
    return isinstance(left, tl.tensor) or bool(left)


def undecided_or(left: Any) -> bool:
    """Return whether ``left or right`` depends on right."""
    return isinstance(left, tl.tensor) or not left


def logical_and(left: Any, right: Any) -> Any:
    """Return ``left and right`` as compiled: element by element, if both are values of the kernel."""
    if isinstance(right, tl.tensor):
        return left.logical_and(right) if isinstance(left, tl.tensor) else right
    return left if right and isinstance(left, tl.tensor) else right


def logical_or(left: Any, right: Any) -> Any:
    """Return ``left or right`` as compiled."""
    if isinstance(right, tl.tensor):
        return left.logical_or(right) if isinstance(left, tl.tensor) else right
    return right if right or not isinstance(left, tl.tensor) else left


def logical_not(operand: Any) -> Any:
    """Return ``not operand`` as compiled."""
    return operand.__not__() if isinstance(operand, tl.tensor) else not operand


def condition(test: Any) -> Any:
    """Return the condition of an ``if`` or a ``while``. The compiler rejects a block, which is true to Python."""
    if isinstance(test, tl.tensor) and test.type.is_block() and math.prod(test.type.shape) != 1:
        raise ValueError(f"a condition is a block of {tuple(test.type.shape)} elements, and must be one number")
    return test


def batch_replacement(function: Any) -> Any:
    """Return the replacement of a Python function where programs run at once; a kernel's file may have its own."""
    return next((ours for pythons, ours in _IN_BATCHES if pythons is function), function)


_IN_BATCHES = ((range, loop), (min, least), (max, largest))
_LOGICAL = (undecided_and, undecided_or, logical_and, logical_or, logical_not, condition)
# The functions that a changed source calls, by the names that it calls them.
LOGIC = {PREFIX + function.__name__: function for function in (*_LOGICAL, batch_replacement)}
