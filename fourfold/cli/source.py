"""The names and kernels of a Python file, read without running it, in milliseconds."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fourfold.operations import registry

# What can define names that its text does not show.
_DYNAMIC = ("globals", "exec", "setattr", "vars", "__getattr__")


class NotThere(ValueError):
    """The command line names a file, a function or an operation that is not there."""


@dataclass(frozen=True)
class Source:
    """A Python file.

    Attributes:
        file: the file.
        tree: its text, parsed.
    """

    file: Path
    tree: ast.Module

    @classmethod
    def of(cls, file: Path) -> "Source":
        """Parse a file.

        Raises:
            NotThere: the file is missing, or is not Python.
        """
        if not file.is_file():
            siblings = [str(path) for path in file.parent.glob(f"*{file.suffix}")] if file.parent.is_dir() else []
            raise NotThere(f"there is no file {file}{registry.did_you_mean(str(file), siblings)}")
        try:
            return cls(file, ast.parse(file.read_text(encoding="utf-8"), str(file)))
        except (SyntaxError, ValueError) as error:
            raise NotThere(f"{file} cannot be read as Python: {error}") from None

    @cached_property
    def definitions(self) -> dict[str, ast.FunctionDef | ast.ClassDef]:
        """Return the functions and classes of the file by name."""
        return {node.name: node for node in _statements(self.tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}

    @cached_property
    def names(self) -> set[str]:
        """Return the names that the file defines or imports."""
        names = set(self.definitions)
        for node in _statements(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        return names

    def require(self, name: str) -> None:
        """Check that the file defines a name.

        Raises:
            NotThere: it does not.
        """
        is_open = "*" in self.names or any(
            (isinstance(node, ast.Name) and node.id in _DYNAMIC)
            or (isinstance(node, ast.FunctionDef) and node.name in _DYNAMIC)
            for node in ast.walk(self.tree)
        )
        if name not in self.names and not is_open:
            raise NotThere(f"{self.file} has no function {name}{registry.did_you_mean(name, self.names)}")

    def kernels(self) -> list[str]:
        """Return the functions that launch the file's Triton kernels and that none of its other functions calls."""
        jitted = {name for name, node in self.definitions.items() if any("jit" in ast.unparse(d) for d in _marks(node))}
        uses = {name: _used_names(node) for name, node in self.definitions.items() if name not in jitted}
        launching: set[str] = set()
        while new := {name for name, names in uses.items() if names & (jitted | launching)} - launching:
            launching |= new
        inner = set[str]().union(*(uses[name] - {name} for name in launching))
        return [name for name in self.definitions if name in launching - inner]

    def operations(self) -> list[str]:
        """Return the functions that `fourfold.operation` declares to be operations."""
        decorators = ("operation", "fourfold.operation")
        return [
            name
            for name, node in self.definitions.items()
            if any(isinstance(mark, ast.Call) and ast.unparse(mark.func) in decorators for mark in _marks(node))
        ]


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and those within its ifs, tries and loops."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _statements(node)


def _marks(node: ast.FunctionDef | ast.ClassDef) -> list[ast.expr]:
    return node.decorator_list


def _used_names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def require_function(text: str) -> None:
    """Check that ``FILE_OR_MODULE:FUNCTION`` names a function, without importing it.

    Raises:
        NotThere: the file or the function is not there, or the text has another form.
    """
    place, colon, name = text.partition("<<<")[0].rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise NotThere(f"expected FILE_OR_MODULE:FUNCTION, as in my_kernels.py:my_softmax, not {text!r}")
    if file := _python_file(place):
        Source.of(file).require(name)
    elif Path(place).suffix in (".cu", ".cuh") and not Path(place).is_file():
        raise NotThere(f"there is no file {place}")


def _python_file(place: str) -> Path | None:
    """Return the file of a Python file's path, or of a module that lies in this folder; None for anything else."""
    if place.endswith(".py"):
        return Path(place)
    module = Path(place.replace(".", "/"))
    return next((file for file in (Path(f"{module}.py"), module / "__init__.py") if file.is_file()), None)


def definition_of(text: str) -> tuple[Path, int]:
    """Return the file of ``FILE_OR_MODULE:FUNCTION`` and the line on which it defines the function, or 1."""
    place, _, name = text.partition("<<<")[0].rpartition(":")
    if file := _python_file(place):
        node = Source.of(file).definitions.get(name)
        return file, node.lineno if node else 1
    if not Path(place).is_file():
        return Path(*place.split(".")).with_suffix(".py"), 1
    lines = Path(place).read_text(encoding="utf-8", errors="replace").splitlines()
    return Path(place), next((number for number, line in enumerate(lines, 1) if re.search(rf"\b{name}\s*\(", line)), 1)


def require_operation(text: str | None) -> None:
    """Check that a text names a known operation, or one that a file declares, as ``FILE.py:OPERATION``.

    Raises:
        NotThere: the operation is unknown, or the text is empty.
    """
    if not text:
        raise NotThere("--as OPERATION is missing, as softmax or FILE.py:OPERATION: `fourfold list` names all")
    if ":" in text:
        require_function(text)
    elif text not in (names := registry.files()):
        raise NotThere(f"there is no operation {text}{registry.did_you_mean(text, names)}")
