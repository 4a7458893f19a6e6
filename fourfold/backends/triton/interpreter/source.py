"""Change a kernel's source so that it has the compiler's meaning, and refuse what the compiler refuses.

To Python a block is true, so that ``a and b`` of two blocks is the right one. To the compiler it is true in those
elements where both are. The compiler refuses statements that the interpreter runs, such as ``break``, and numbers of
the module that are no `tl.constexpr`. They are refused where they run, because the compiler skips branches whose
condition is constant; of an ``if`` whose condition is computed it compiles both branches.
"""

import ast
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import triton
import triton.language as tl
from triton.compiler.code_generator import CodeGenerator
from triton.runtime import interpreter

from fourfold.backends import observers
from fourfold.backends.triton.interpreter.batches import largest, least, loop

# Of the names that a changed source uses. Triton adds the names of its interpreter's module to those of the kernel's.
PREFIX = "_fourfold_"


# Statements and expressions that releases of Triton refuse.
_STATEMENTS = (ast.Break, ast.Continue, ast.Raise, ast.Try, ast.Delete, ast.Global, ast.Nonlocal, ast.Match)
_EXPRESSIONS = (ast.Lambda, ast.Dict, ast.Set, ast.DictComp, ast.SetComp, ast.GeneratorExp)
_REFUSED = tuple(kind for kind in _STATEMENTS + _EXPRESSIONS if not hasattr(CodeGenerator, f"visit_{kind.__name__}"))
_NUMBER = (
    "Cannot access global variable {0} from within @jit'ed function: it must be instantiated as a constexpr, "
    "{0} = tl.constexpr(...)"
)
_RETURN = "Cannot have `return` statements inside `while` or `for` statements in triton."


class KernelSource(interpreter.ASTTransformer):
    """Triton's own changes of a function's source, preceded by those of this module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Change a whole source."""
        for conditional, *numbers in observers.conditional_parts(node):
            conditional.parts = numbers  # type: ignore[attr-defined]  # for `marks`
        logic = _Logic(not hasattr(interpreter.ASTTransformer, "visit_Compare"), _numbers_of_the_module(self.function))
        for function in node.body:
            if isinstance(function, ast.FunctionDef):
                function.body = [logic.visit(statement) for statement in function.body]
        return super().generic_visit(node)


def _numbers_of_the_module(function: Callable[..., Any]) -> set[str]:
    """Return the names of the module's numbers and strings in a function, which the compiler refuses to read."""
    if triton.knobs.compilation.allow_non_constexpr_globals:
        return set()
    known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    annotated = function.__globals__.get("__annotations__", {})  # releases of Triton accept an annotated one
    code = function.__code__
    local = {*code.co_varnames, *code.co_cellvars}
    used = {*code.co_names, *code.co_freevars} - local - annotated.keys()
    return {name for name in used if type(known.get(name)) in (bool, int, float, str, list, tuple)}


class _Logic(ast.NodeTransformer):
    """Replaces Python's logic, and what the compiler refuses, by calls of the functions below.

    Args:
        single_comparisons: whether to reject ``a < b < c``. Triton 3.6 does not compile it, and its interpreter gives
            ``b < c``.
        numbers: the names that the compiler refuses to read.
    """

    def __init__(self, single_comparisons: bool, numbers: Collection[str]) -> None:
        self.single_comparisons, self.numbers, self.loops = single_comparisons, numbers, 0
        self.names = (f"{PREFIX}operand_{number}" for number in itertools.count())

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Replace ``a and b`` by ``logical_and(t, b) if undecided_and(t := a) else t``."""
        self.generic_visit(node)
        word = "and" if isinstance(node.op, ast.And) else "or"
        left, *others = node.values
        for right in others:
            name = next(self.names)
            kept = ast.NamedExpr(target=ast.Name(id=name, ctx=ast.Store()), value=left)
            both = _call(f"logical_{word}", ast.Name(id=name, ctx=ast.Load()), right)
            left = ast.IfExp(_call(f"undecided_{word}", kept), both, ast.Name(id=name, ctx=ast.Load()))
        return ast.copy_location(left, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """Replace ``not a``."""
        self.generic_visit(node)
        return ast.copy_location(_call("logical_not", node.operand), node) if isinstance(node.op, ast.Not) else node

    def visit(self, node: ast.AST) -> Any:
        """Replace a statement, an expression or a name that the compiler refuses."""
        if isinstance(node, _REFUSED):
            call = ast.copy_location(_call("refuse", ast.Constant(_unsupported(node))), node)
            return ast.copy_location(ast.Expr(call), node) if isinstance(node, ast.stmt) else call
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self.numbers:
            return ast.copy_location(_call("refuse", ast.Constant(_NUMBER.format(node.id))), node)
        return super().visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> ast.AST:
        """Replace the condition of ``if a``."""
        refused = next(_refused_branches(node, self.loops > 0), "") if isinstance(node, ast.If) else ""
        self.generic_visit(node)
        more = [ast.Constant(refused)] if refused else []
        node.test = ast.copy_location(_call("condition", node.test, *more), node.test)
        return node

    visit_IfExp = visit_If

    def visit_While(self, node: ast.While) -> ast.AST:
        """Replace the condition of ``while a``."""
        self.visit_For(node)
        node.test = ast.copy_location(_call("condition", node.test), node.test)
        return node

    def visit_For(self, node: ast.For | ast.While) -> ast.AST:
        """Count the loops around a statement."""
        self.loops += 1
        self.generic_visit(node)
        self.loops -= 1
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace ``range(a)`` by ``in_batches(range)(a)``, and likewise ``min`` and ``max``."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("range", "min", "max"):
            node.func = ast.copy_location(_call("in_batches", node.func), node.func)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Reject ``a < b < c`` if `single_comparisons`."""
        if len(node.ops) > 1 and self.single_comparisons:
            raise NotImplementedError(f"this release of Triton compiles no chain of comparisons: {ast.unparse(node)}")
        return self.generic_visit(node)


def _unsupported(node: ast.AST) -> str:
    return f"unsupported AST node type: {type(node).__name__}"


def _refused_branches(node: ast.If, in_loop: bool) -> Iterator[str]:
    """Yield why the compiler refuses the branches of an ``if`` whose condition is computed."""
    waiting: list[ast.AST] = [*node.body, *node.orelse]
    for each in waiting:  # it grows
        if isinstance(each, _REFUSED):
            yield _unsupported(each)
        elif in_loop and isinstance(each, ast.Return):
            yield _RETURN
        elif not isinstance(each, ast.If):  # one within has a condition of its own
            waiting += ast.iter_child_nodes(each)


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


def refuse(reason: str) -> None:
    """Raise NotImplementedError for what the compiler refuses."""
    raise NotImplementedError(reason)


def condition(test: Any, refused: str = "") -> Any:
    """Return the condition of an ``if`` or a ``while``. The compiler rejects a block, which is true to Python.

    `refused` is the reason why the compiler refuses the branches, if it does. Of a constant condition it skips one.
    """
    if refused and isinstance(test, tl.tensor):
        refuse(refused)
    if isinstance(test, tl.tensor) and test.type.is_block() and math.prod(test.type.shape) != 1:
        raise ValueError(f"a condition is a block of {tuple(test.type.shape)} elements, and must be one number")
    return test


def in_batches(function: Any) -> Any:
    """Return the replacement of a Python function where programs run at once; a kernel's file may have its own."""
    return next((ours for pythons, ours in _IN_BATCHES if pythons is function), function)


_IN_BATCHES = ((range, loop), (min, least), (max, largest))
_LOGICAL = (undecided_and, undecided_or, logical_and, logical_or, logical_not, condition)
# The functions that a changed source calls, by the names that it calls them.
LOGIC = {PREFIX + function.__name__: function for function in (*_LOGICAL, in_batches, refuse)}
