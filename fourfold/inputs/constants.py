"""Constants in an implementation's source: a kernel goes wrong at its own numbers, which no fixed list of sizes holds.

Fuzzers take such a dictionary from the program under test. In a Python file, the syntax tree gives the functions that
the implementation reaches, and the functions that those import from files beside it. In a `.cu` file, all tokens are
read. An integer type yields the number of its values from 0: a counter of `int8` goes wrong at 128. A kernel that reads
its place along the second or third axis of a grid yields the most blocks that a GPU takes along that axis.
"""

import ast
import functools
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.backends.cuda.declarations import SUFFIXES, strip_comments
from fourfold.backends.launch import MAX_GRID
from fourfold.backends.python_source import Module, SizeComparison, name_of

# The range of the constants that become sizes. Generated cases have the smaller sizes anyway, and larger ones get none.
LEAST, MOST = 6, 150_000
# The largest magnitude of a compared value. It exceeds float16's range, because values beyond that are of use, too.
FURTHEST = 1e30
# Keyword arguments of launches and of other calls that are not sizes.
_NO_SIZES = {"num_warps", "num_stages", "num_ctas", "maxnreg", "dim", "axis", "dims"}
# The number of values that a type counts, from 0.
_TYPES = {"int8": 128, "uint8": 256, "int16": 32_768, "uint16": 65_536}
# Functions whose arguments limit values.
_LIMITS = {"where", "clamp", "clip", "minimum", "maximum", "min", "max"}
# Triton's functions with an axis of the grid as their argument.
_OF_GRID = {"program_id", "num_programs"}
_CPP_GRID = r"\b(?:blockIdx|gridDim)\s*\.\s*(?:(?P<y>y)|z)\b"
_CPP_TYPES = r"\b(?:(?P<t>u?int(?:8|16))_t|(?P<u8>unsigned\s+char)|(?P<u16>unsigned\s+short)|(?P<i16>short))\b"
_CPP_INTEGER = r"(?<![\w.])(0[xX][0-9a-fA-F]+|\d+)(?:[uUlL]*)(?![\w.])"
_CPP_COMPARED = r"(?:(?<![<>\-])[<>]=?|[=!]=)\s*(-?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)[fF]?(?![\w.<>])"


@dataclass(frozen=True, order=True)
class Constant:
    """A number in a source file."""

    value: float
    file: str
    line: int


@dataclass(frozen=True)
class Constants:
    """The constants of a source.

    Attributes:
        sizes: whole numbers, each once, in ascending order.
        values: the numbers in comparisons, each once, in ascending order.
        comparisons: the comparisons that decide which branch the Python code takes.
    """

    sizes: tuple[Constant, ...] = ()
    values: tuple[Constant, ...] = ()
    comparisons: tuple[SizeComparison, ...] = field(default=(), repr=False)


NONE = Constants()


def constants_of(implementation: Any) -> Constants:
    """Return the constants in the source of a function, a module or a class, or `NONE` if there is no source."""
    target = getattr(implementation, "__self__", None)
    target = target if isinstance(target, type) else inspect.unwrap(implementation)
    for owner in (target, type(target)):
        try:
            file = Path(inspect.getfile(owner)).resolve()
        except (TypeError, OSError):
            continue
        return file_constants(file, getattr(owner, "__name__", ""))
    return NONE


@functools.lru_cache(maxsize=64)
def file_constants(file: Path, name: str = "") -> Constants:
    """Return the constants of a file.

    Args:
        file: a `.py` or a `.cu` file.
        name: the function or class of a Python file where reading starts. If the file does not define it, all of the
            file is read.
    """
    source = _Source()
    source.read(file, name)
    return Constants(_unique(source.sizes), _unique(source.values), tuple(dict.fromkeys(source.comparisons)))


def _unique(constants: list[Constant]) -> tuple[Constant, ...]:
    first: dict[float, Constant] = {}
    for constant in constants:
        first.setdefault(constant.value, constant)
    return tuple(sorted(first.values()))


class _Source:
    """The constants found so far in a file, and in the files beside it that it uses."""

    def __init__(self) -> None:
        self.sizes: list[Constant] = []
        self.values: list[Constant] = []
        self.comparisons: list[SizeComparison] = []
        self._modules: dict[Path, Module | None] = {}
        self._visited: set[Any] = set()

    def read(self, file: Path, name: str) -> None:
        """Read the code that one name of a file reaches, or all of the file if it does not define the name."""
        if file.suffix in SUFFIXES:
            self._read_cuda_file(file)
            return
        module = self._module(file)
        if module is None:
            return
        for node in module.defined.get(name) or [module.tree]:
            self._read_node(module, node)

    def _module(self, file: Path) -> "Module | None":
        if file not in self._modules:
            try:
                self._modules[file] = Module(file)
            except (OSError, SyntaxError, ValueError):
                self._modules[file] = None
        return self._modules[file]

    # ---- Python

    def _read_node(self, module: "Module", top: ast.AST) -> None:
        """Read the constants of a statement, and of the definitions that it names."""
        if id(top) in self._visited:
            return
        self._visited.add(id(top))
        self.comparisons += _comparisons(module.file, top)
        for node in _walk_code(top):
            if isinstance(node, ast.Constant | ast.BinOp) and (value := module.fold(node)) is not None:
                self._add(value, module.file, node.lineno)
            if isinstance(node, ast.Compare):
                self._read_comparison([node.left, *node.comparators], module)
            elif isinstance(node, ast.Call) and name_of(node.func) in _LIMITS:
                self._read_comparison(node.args, module)
            elif isinstance(node, ast.Call) and name_of(node.func) in _OF_GRID:
                axes = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "axis")]
                if axes and (axis := module.fold(axes[0])) in (1, 2):
                    self._add(MAX_GRID[axis], module.file, node.lineno)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._read_text(node.value, module, node.lineno)
            elif isinstance(node, ast.Name | ast.Attribute):
                self._read_name(name_of(node), module, node)

    def _read_name(self, name: str, module: "Module", node: ast.expr) -> None:
        if name in _TYPES:
            self._add(_TYPES[name], module.file, node.lineno)
        for definition in module.defined.get(name, ()):
            self._read_node(module, definition)
        if (name not in module.defined) and (imported := module.imported.get(name)):
            file, original = imported
            if (file, original) not in self._visited:
                self._visited.add((file, original))
                other = self._module(file)
                for definition in other.defined.get(original, ()) if other else ():
                    self._read_node(other, definition)  # type: ignore[arg-type]

    def _add(self, value: int, file: Path, line: int) -> None:
        if LEAST <= value <= MOST:
            self.sizes.append(Constant(value, file.name, line))

    def _read_comparison(self, operands: list[ast.expr], module: "Module") -> None:
        for operand in operands:
            negative = isinstance(operand, ast.UnaryOp) and isinstance(operand.op, ast.USub)
            sign, number = (-1, operand.operand) if negative else (1, operand)  # type: ignore[attr-defined]
            value = number.value if isinstance(number, ast.Constant) else None
            if isinstance(value, int | float) and not isinstance(value, bool) and 0 < abs(value) <= FURTHEST:
                self.values.append(Constant(float(sign * value), module.file.name, operand.lineno))

    def _read_text(self, text: str, module: "Module", line: int) -> None:
        """Read the CUDA C++ code that a string contains, or the file of CUDA C++ that it names."""
        if "__global__" in text:
            self._read_cuda(text, module.file, line)
        elif text == ".cu":
            self._read_cuda_file(module.file.with_suffix(".cu"))
        elif text.endswith(SUFFIXES) and len(text) < 200:
            self._read_cuda_file(module.file.parent / text)

    # ---- CUDA C++

    def _read_cuda_file(self, file: Path) -> None:
        file = file.resolve()
        if file in self._visited or not file.is_file():
            return
        self._visited.add(file)
        text = file.read_text(errors="replace")
        self._read_cuda(text, file, 1)
        for included in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            for folder in file.parents[:2]:
                self._read_cuda_file(folder / included)

    def _read_cuda(self, text: str, file: Path, first: int) -> None:
        code = strip_comments(text)

        def line(position: int) -> int:
            return first + code.count("\n", 0, position)

        for match in re.finditer(_CPP_INTEGER, code):
            self._add(int(match[1], 0 if match[1][:2] in ("0x", "0X") else 10), file, line(match.start()))
        for match in re.finditer(r"\b(\d+)[uUlL]*\s*(<<|\*)\s*(\d+)[uUlL]*\b", code):
            left, right = int(match[1]), int(match[3])
            if match[2] == "*" or right < 32:
                self._add(left * right if match[2] == "*" else left << right, file, line(match.start()))
        for match in re.finditer(_CPP_TYPES, code):
            name = match["t"] or ("uint8" if match["u8"] else "uint16" if match["u16"] else "int16")
            self._add(_TYPES[name], file, line(match.start()))
        for match in re.finditer(_CPP_GRID, code):
            self._add(MAX_GRID[1 if match["y"] else 2], file, line(match.start()))
        for match in re.finditer(_CPP_COMPARED, code):
            value = float(match[1])
            if 0 < abs(value) <= FURTHEST:
                self.values.append(Constant(value, file.name, line(match.start())))


def _comparisons(file: Path, top: ast.AST) -> Iterator[SizeComparison]:
    """Yield the comparisons in the conditions below a node, except those in Triton kernels."""
    pending: list[tuple[ast.AST, int]] = [(top, 0)]
    while pending:
        node, line = pending.pop()
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            continue
        line = node.lineno if isinstance(node, ast.stmt) else line
        pending += [(child, line) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            for comparison in ast.walk(node.test):
                if isinstance(comparison, ast.Compare):
                    sides = [comparison.left, *comparison.comparators]
                    for op, left, right in zip(comparison.ops, sides, sides[1:]):
                        if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE | ast.Eq | ast.NotEq):
                            yield SizeComparison(os.path.realpath(file), line, ast.unparse(left), ast.unparse(right))


def _walk_code(top: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes below it, except standalone strings and the keyword arguments in `_NO_SIZES`."""
    pending = [top]
    while pending:
        node = pending.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            documentation = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if not documentation and not (isinstance(child, ast.keyword) and child.arg in _NO_SIZES):
                pending.append(child)
