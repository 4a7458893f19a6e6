"""Python source of implementations: the definitions and imports of a file, and its comparisons."""

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_FOLDED: dict[type, Callable[[int, int], int]] = {
    ast.LShift: operator.lshift,
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def name_of(node: ast.AST) -> str:
    """Return a name, or the last part of a dotted one; "" for any other expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


class Module:
    """A Python file: its definitions, and its imports from files beside it.

    Attributes:
        defined: functions and classes at any depth, and assignments of the module, by name.
        imported: the file and the name there, by the name here.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"), file.name)
        self.defined: dict[str, list[ast.AST]] = {}
        self.imported: dict[str, tuple[Path, str]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.defined.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ImportFrom):
                self._import(node)
        for node in self.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for each in ast.walk(target):
                        if isinstance(each, ast.Name):
                            self.defined.setdefault(each.id, []).append(node)

    def _import(self, node: ast.ImportFrom) -> None:
        folder = self.file.parent
        for _ in range(node.level - 1):
            folder = folder.parent
        place = folder.joinpath(*(node.module or "").split("."))
        for alias in node.names:
            for file in (place.with_suffix(".py"), place / f"{alias.name}.py"):
                if file.name != ".py" and file.is_file():
                    self.imported[alias.asname or alias.name] = (file, alias.name)
                    break

    def fold(self, node: ast.AST, depth: int = 0) -> int | None:
        """Return the integer value of a constant expression, or None for any other expression."""
        if isinstance(node, ast.Constant):
            is_integer = isinstance(node.value, int) and not isinstance(node.value, bool)
            return node.value if is_integer else None  # type: ignore[return-value]
        if isinstance(node, ast.Name) and depth < 8:
            assignments = [
                statement for statement in self.defined.get(node.id, ()) if isinstance(statement, ast.Assign)
            ]
            return self.fold(assignments[0].value, depth + 1) if len(assignments) == 1 else None
        if isinstance(node, ast.BinOp) and type(node.op) in _FOLDED:
            left, right = self.fold(node.left, depth + 1), self.fold(node.right, depth + 1)
            if left is None or right is None or (isinstance(node.op, ast.FloorDiv) and not right):
                return None
            if isinstance(node.op, ast.LShift | ast.Pow) and not 0 <= right <= 32:
                return None
            return _FOLDED[type(node.op)](left, right)
        return None


@dataclass(frozen=True)
class SizeComparison:
    """A comparison in a test of an ``if``, a ``while`` or a conditional expression.

    Attributes:
        file: the real path.
        line: where the statement begins.
        left, right: the two sides, as Python writes them.
    """

    file: str
    line: int
    left: str
    right: str
