"""Marks in a kernel's source, which record which of its lines have run.

Triton's interpreter runs so much Python for a line of a kernel that tracing would double its time. A mark is one
assignment to a dictionary, before each stretch of statements that run together.
"""

import ast
from typing import Any

from triton.runtime import interpreter

from fourfold.backends import observers

# The dictionary, by its name in a changed source.
NAME = "_fourfold_ran"


def _mark_body(body: list[ast.stmt], file: str, head: int = 0) -> list[ast.stmt]:
    """Return statements with a mark before each stretch that only an exception can leave.

    `head` is the line of the statement around them: those on the same line are a part of it.
    """
    marked, together = list[ast.stmt](), list[ast.stmt]()
    for statement in body:
        together.append(statement)
        if _divide(statement, file):
            marked += _mark_statements(together, file, head)
            together = []
    return marked + _mark_statements(together, file, head)


def _divide(statement: ast.stmt, file: str) -> bool:
    """Mark the statements within a statement; return whether there are any."""
    parts = [statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
    divided = False
    for part in parts:
        for name in ("body", "orelse", "finalbody"):
            if inner := getattr(part, name, None):
                setattr(part, name, _mark_body(inner, file, statement.lineno))
                divided = True
    return divided


class _Conditional(ast.NodeTransformer):
    """Marks the sides of the source's conditional expressions: ``a`` becomes ``mark or a``, and the mark is None."""

    def __init__(self, file: str) -> None:
        self.file = file

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if numbers := getattr(node, "parts", ()):
            node.body, node.orelse = (
                self._mark_expression(side, observers.part_of_line(node.lineno, number))
                for side, number in zip((node.body, node.orelse), numbers)
            )
        return node

    def _mark_expression(self, side: ast.expr, place: int) -> ast.expr:
        number = observers.marks.add(self.file, (place,))
        set_item = ast.Attribute(ast.Name(NAME, ast.Load()), "__setitem__", ast.Load())
        mark = ast.Call(set_item, [ast.Constant(number), ast.Constant(True)], [])
        return ast.copy_location(ast.BoolOp(ast.Or(), [mark, side]), side)


def _mark_statements(statements: list[ast.stmt], file: str, head: int) -> list[ast.stmt]:
    if not statements:
        return []
    lines = (statement.lineno for statement in statements)
    places = (observers.part_of_line(line, 1) if line == head else line for line in lines)
    number = observers.marks.add(file, tuple(places))
    place = ast.Subscript(ast.Name(NAME, ast.Load()), ast.Constant(number), ast.Store())
    mark = ast.copy_location(ast.Assign([place], ast.Constant(True)), statements[0])
    return [mark, *statements]


def install() -> None:
    """Let Triton's interpreter mark the kernels that it runs from now on, whatever decorator made them."""
    shipped = interpreter.FunctionRewriter._compile_and_exec

    def add_marks(self: Any, transformed_ast: Any) -> Any:
        """Add the marks at the end: the lines are those of the file by now."""
        for node in transformed_ast.body:
            if isinstance(node, ast.FunctionDef):
                node.body = _mark_body([_Conditional(self.filename).visit(each) for each in node.body], self.filename)
        ast.fix_missing_locations(transformed_ast)
        return shipped(self, transformed_ast)

    interpreter.FunctionRewriter._compile_and_exec = add_marks
    interpreter.InterpretedFunction.rewritten_fn.clear()  # kernels that ran before are changed again, with marks
    vars(interpreter)[NAME] = observers.marks.ran
