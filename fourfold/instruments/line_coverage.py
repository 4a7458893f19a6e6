"""Lines of implementations that never ran, and the conditions under which they would have run.

The statements are those of the functions that an implementation reaches by name, in its file and in neighbouring files
from which it imports. Lines of a module, and of functions that its decorators call, run on import and do not count.
`fourfold.instruments.line_recorder` records the executed lines.
"""

import ast
import contextlib
import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

from fourfold.backends.cuda.declarations import SUFFIXES
from fourfold.backends.cuda.emulator import launcher
from fourfold.backends.cuda.emulator.reached import Line
from fourfold.backends.observers import PARTS, conditional_parts, part_of_line, parts_of_code
from fourfold.backends.python_source import Module, name_of
from fourfold.instruments import cuda_line_coverage
from fourfold.instruments.line_recorder import recorder, sees_all_threads

# The number of entries in a text, and of characters in a condition.
SHOWN, LONGEST = 10, 70
# Functions whose bodies may have run before recording began.
_EARLY = {"__init__", "__new__", "__init_subclass__", "__set_name__"}
# Functions that describe a module's kernels, and run outside of their calls.
_ASKED = {"depends_on_batch", "offsets_in_32_bits"}
# Parts of the names of caching decorators: the function may have run before recording began.
_KEEPS = ("cache", "memo")
# Triton's interpreter calls the combining functions of these without marks.
_COMBINE = {"reduce", "associative_scan"}
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
ON_A_GPU = "never executed: lines of kernels are not seen on a GPU"
OF_CUDA = "never executed: lines of a .cu file are seen on the CPU alone"
NO_BACKWARD = "never executed: not known, as a backward pass on a GPU is seen from Python 3.12 on alone"
COMPILED = "never executed: not known, as torch.compile replaces functions"
BLIND = "never executed: not known, as something else traces the program"


@dataclass(frozen=True)
class Unexecuted:
    """Lines that never ran.

    Attributes:
        file: its name.
        lines: "41", or "41-45".
        condition: the condition under which the first of them runs, as in the source; "" if it always runs.
    """

    file: str
    lines: str
    condition: str

    def __str__(self) -> str:
        return f"never executed: {self.file}:{self.lines}" + (f" ({self.condition})" if self.condition else "")

    def as_dict(self) -> dict[str, str]:
        """Return the entry as a mapping for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Statement:
    """A statement of a function; for a compound statement, its head.

    Attributes:
        first: its first line; for a part of a kernel's line, its place: see `fourfold.backends.observers.part_of_line`.
        last: its last one.
        condition: the condition under which it runs; "" if it always runs.
        function: the name of its function.
        begin: the first line of the function.
        kernel: whether the function is a Triton kernel.
    """

    first: int
    last: int
    condition: str
    function: str
    begin: int
    kernel: bool

    @property
    def is_part(self) -> bool:
        """Return whether it is a part of a line: one side of a conditional expression, or a body behind a colon."""
        return self.first >= PARTS

    @property
    def line(self) -> int:
        """Return its first line."""
        return self.first % PARTS


def _import_time_calls(top: ast.AST) -> Iterator[str]:
    """Yield the names of functions that a node's own statements call, without those in nested definitions."""
    pending: list[ast.AST] = [top]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                pending.append(node)
                if isinstance(node, ast.Call):
                    yield name_of(node.func)


class StatementMap:
    """The statements of an implementation's functions, by the real name of the file."""

    def __init__(self, file: Path, name: str = "") -> None:
        self.statements: dict[str, dict[int, Statement]] = {}
        self._modules: dict[Path, Module | None] = {}
        self._visited: set[int] = set()
        self._combine: set[str] = set()  # functions that combine two values in a reduction
        self.compiles = False  # whether torch.compile may replace functions by others
        module = self._module(file.resolve())
        if module is None:
            return
        for node in module.defined.get(name) or [module.tree]:
            self._read(module, node)

    def _module(self, file: Path) -> Any:
        if file not in self._modules:
            try:
                module = self._modules[file] = Module(file) if file.suffix == ".py" else None
                self.compiles |= module is not None and any(map(_compiles, ast.walk(module.tree)))
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                self._modules[file] = None
        return self._modules[file]

    def _read(self, module: Module, top: ast.AST) -> None:
        """Add the functions of a node, and the functions that they name."""
        if id(top) in self._visited:
            return
        self._visited.add(id(top))
        if isinstance(top, ast.FunctionDef | ast.AsyncFunctionDef):
            self._take(module, top)
            self._follow(module, top.body)
        elif isinstance(top, ast.ClassDef | ast.Module):
            on_import = set(_import_time_calls(top)) if isinstance(top, ast.Module) else set()
            defined = [x for x in top.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
            for node in defined:
                if node.name not in on_import:
                    self._read(module, node)
        elif isinstance(top, ast.Assign | ast.AnnAssign) and top.value is not None:
            # For example ``softmax = Softmax.apply``, or an operator made of functions. Called functions run on import.
            self._follow(module, [top.value], set(_import_time_calls(top)))

    def _follow(self, module: Module, nodes: Iterable[ast.AST], leaving: Collection[str] = ()) -> None:
        """Add the functions named in nodes, except those in `leaving`."""
        for node in itertools.chain.from_iterable(map(ast.walk, nodes)):
            if isinstance(node, ast.Call) and name_of(node.func) in _COMBINE:
                self._combine.update(map(name_of, [*node.args, *(keyword.value for keyword in node.keywords)]))
            if not isinstance(node, ast.Name | ast.Attribute):
                continue
            name = name_of(node)
            if name in leaving:
                continue
            for definition in module.defined.get(name, ()):
                self._read(module, definition)
            if name not in module.defined and name in module.imported:
                file, original = module.imported[name]
                definer = self._module(file.resolve())
                for definition in definer.defined.get(original, ()) if definer else ():
                    self._read(definer, definition)

    def _take(self, module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        file = str(module.file)
        if function.name in _EARLY | _ASKED:
            return
        lines, text = _lines_with_code(module.file), module.file.read_text(encoding="utf-8", errors="replace")
        statements = self.statements.setdefault(file, {})
        for s in _Reader(text, function).statements():
            extent = range(s.line, s.last + 1) if s.kernel or not s.is_part else (s.first,)
            if any(line in lines for line in extent):
                statements.setdefault(s.first, s)

    @property
    def has_kernels(self) -> bool:
        """Return whether a Triton kernel is among the functions."""
        return any(statement.kernel for by_line in self.statements.values() for statement in by_line.values())

    def watch(self) -> dict[str, dict[int, int]]:
        """Return the argument for `LineRecorder.watch`."""
        return {
            file: {
                line: s.first
                for s in by_line.values()
                for line in range(s.first, max(s.last, s.first if not s.kernel else 0) + 1)
            }
            for file, by_line in self.statements.items()
        }

    def report(self, hits: Mapping[str, Collection[int]], kernels: bool) -> list[list[Any]]:
        """Return all statements, each with whether it ran, as lists for JSON.

        Args:
            hits: the first lines of executed statements, by file.
            kernels: whether to include statements of kernels.
        """
        return [
            [file, *astuple(s), s.first in hits.get(file, ())]
            for file, by_line in self.statements.items()
            for s in by_line.values()
            if (kernels or not s.kernel) and s.function not in self._combine
        ]


class Elsewhere(Protocol):
    """A function that runs in another process."""

    file: Path
    function: str

    def watch_lines(self, statements: Mapping[str, Mapping[int, int]]) -> None:
        """See `fourfold.candidates.process.client.UntrustedFunction.watch_lines`."""

    def lines(self) -> tuple[dict[str, set[int]], bool]:
        """Return the executed lines, and whether the recorder missed some."""

    def forget_lines(self, lines: Mapping[str, Collection[int]]) -> None:
        """See `fourfold.candidates.process.client.UntrustedFunction.forget_lines`."""

    def kernel_lines(self) -> list[Line]:
        """Return the lines of its `.cu` file, if it has one."""


class Executed:
    """The executed lines of a run's implementations, combined from the run's processes.

    Args:
        traces: whether to compile kernels of `.cu` files with line tracing on the CPU.

    Attributes:
        unseen: the reasons why some or all lines cannot be recorded.
    """

    def __init__(self, traces: bool = False) -> None:
        self.unseen: dict[str, None] = {}
        self._traces = traces
        if traces:
            launcher.trace_lines()
        self._sources: dict[tuple[str, str], StatementMap] = {}
        # The functions in other processes, and the lines executed there, by file.
        self._elsewhere: list[Elsewhere] = []
        self._hits: dict[str, set[int]] = {}
        self._of_kernels: list[Line] = []
        self._kernels = True
        # By file and first line: the statement, and whether it ran.
        self._statements: dict[tuple[str, int], tuple[Statement, bool]] = {}

    def watch(self, file: Path, name: str, device: str, elsewhere: Elsewhere | None = None) -> None:
        """Watch the functions that can be reached from the one with a name in a file, or all if there is no name.

        Args:
            file: the file of the functions.
            name: the function to start from.
            device: the device that they run on.
            elsewhere: the function in another process that runs them, if any.
        """
        if (str(file), name) in self._sources:
            return
        source = self._sources[str(file), name] = StatementMap(file, name)
        if device == "cuda":
            self._kernels = False
            self.unseen |= dict.fromkeys([ON_A_GPU] if source.has_kernels else [])
            self.unseen |= dict.fromkeys([] if sees_all_threads() else [NO_BACKWARD])
        if source.compiles:
            self.unseen[COMPILED] = None
        if file.suffix in SUFFIXES and not self._traces:
            self.unseen[OF_CUDA] = None
        if elsewhere is None:
            recorder.watch(source.watch())
        else:
            elsewhere.watch_lines(source.watch())
            self._elsewhere.append(elsewhere)

    def gather(self) -> None:
        """Fetch the executed lines from the processes of candidates before they end."""
        for function in self._elsewhere:
            lines, blind = function.lines()
            if blind:
                self.unseen[BLIND] = None
            for file, hits in lines.items():
                self._hits.setdefault(file, set()).update(hits)
            self._of_kernels += function.kernel_lines()

    def report(self) -> dict[str, Any]:
        """Return the records of this process, as a mapping for JSON."""
        if recorder.blind:
            self.unseen[BLIND] = None
        local = recorder.lines()
        hits = {file: {*local.get(file, ()), *self._hits.get(file, ())} for file in local.keys() | self._hits.keys()}
        statements = [entry for source in self._sources.values() for entry in source.report(hits, self._kernels)]
        kernels = [*launcher.lines_that_ran(), *self._of_kernels] if self._traces else []
        of_cuda = cuda_line_coverage.coverage_lines(kernels, any(not name for _, name in self._sources))
        return {"unseen": [*self.unseen], "statements": statements + of_cuda}

    def add(self, records: Any) -> None:
        """Add the records of a process. It ran candidates, so malformed records are ignored."""
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
            self.unseen |= {_one_line(reason): None for reason in records["unseen"]}
            for file, first, last, condition, function, begin, kernel, hit in records["statements"]:
                texts = _one_line(condition), _one_line(function)
                statement = Statement(int(first), int(last), *texts, int(begin), bool(kernel))
                key = _one_line(file), statement.first
                self._statements[key] = statement, bool(hit) or self._statements.get(key, (statement, False))[1]

    def never(self) -> list[Unexecuted]:
        """Return the lines that never ran, or [] if that is unknown."""
        if {BLIND, NO_BACKWARD, COMPILED} & self.unseen.keys():
            return []
        by_file: dict[str, list[tuple[Statement, bool]]] = {}
        for (file, _), statement in sorted(self._statements.items(), key=lambda pair: pair[0]):
            by_file.setdefault(file, []).append(statement)
        names = self._names()
        return [stretch for file, group in by_file.items() for stretch in _stretches(names[file], group)]

    def _names(self) -> dict[str, str]:
        """Return a short name for each file: its own, or with its folder's if two files share a name."""
        files = {Path(file) for file, _ in self._statements}
        alone = Counter(file.name for file in files)
        return {str(file): file.name if alone[file.name] == 1 else f"{file.parent.name}/{file.name}" for file in files}

    def lines(self, full: bool = False) -> Iterator[str]:
        """Yield the report below a run's table; if `full`, with all entries and the names of the files."""
        yield from self.unseen
        gaps = self.never()
        yield from map(str, gaps) if full else report_lines(gaps)
        if full:
            files = sorted(self._names().values())
            yield f"never executed: {len(gaps)} stretches of {len(self._statements)} statements of {', '.join(files)}"


def _one_line(text: Any) -> str:
    return "".join(c for c in " ".join(str(text).split()) if c.isprintable())


def report_lines(gaps: Sequence[Unexecuted]) -> Iterator[str]:
    """Yield a line for each stretch in `gaps`, at most `SHOWN`."""
    yield from map(str, gaps[:SHOWN])
    if len(gaps) > SHOWN:
        yield f"never executed: and {len(gaps) - SHOWN} more"


def _stretches(file: str, statements: Sequence[tuple[Statement, bool]]) -> Iterator[Unexecuted]:
    """Yield an entry for each stretch of consecutive statements of a function that never ran."""
    parts = [pair for pair in statements if pair[0].is_part]
    statements = [pair for pair in statements if not pair[0].is_part]
    ran_lines = {line for s, hit in statements if hit for line in range(s.first, s.last + 1)}
    for statement, hit in parts:
        if not hit and statement.line in ran_lines:
            yield Unexecuted(file, str(statement.line), statement.condition)
    called_functions = {(s.function, s.begin) for s, hit in statements if hit}
    for (hit, *function), group in itertools.groupby(
        statements, lambda pair: (pair[1], pair[0].function, pair[0].begin)
    ):
        if not hit:
            run = [s for s, _ in group]
            first, last = run[0].first, max(s.last for s in run)
            condition = (
                run[0].condition if tuple(function) in called_functions else f"{run[0].function} is never called"
            )
            yield Unexecuted(file, str(first) if last == first else f"{first}-{last}", condition)


class _Reader:
    """A reader of the statements of a function.

    Args:
        text: of the file.
        function: its node.
    """

    def __init__(self, text: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._text, self._function = text, function

    def statements(self) -> Iterator[Statement]:
        """Yield all statements, including those of nested functions."""
        return self._function_statements(self._function, self._function.name)

    def _function_statements(self, node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[Statement]:
        decorators = [ast.unparse(d) for d in node.decorator_list]
        kernel = any("jit" in d for d in decorators)
        cached = any(word in d for d in decorators for word in _KEEPS)
        if not cached:
            for conditional, *numbers in conditional_parts(node):
                if conditional.lineno < node.body[0].lineno:  # a default
                    continue
                line, test = conditional.lineno, conditional.test
                for number, condition in zip(numbers, (self._shorten(self._source_text(test)), self._not(test))):
                    yield Statement(part_of_line(line, number), line, condition, name, node.lineno, kernel)
        if not cached:
            yield from self._body_statements(node.body, "", (name, node.lineno, kernel))

    def _body_statements(
        self, body: list[ast.stmt], condition: str, function: tuple[str, int, bool], head: int = 0
    ) -> Iterator[Statement]:
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from self._function_statements(statement, statement.name)
                continue
            if isinstance(statement, ast.ClassDef):
                continue
            inner = list(self._parts(statement))
            heads = [_begin(part[0]) - 1 for part, _ in inner if part and _begin(part[0]) > statement.lineno]
            last = min(heads, default=statement.lineno) if inner else statement.end_lineno or statement.lineno
            first = statement.lineno if statement.lineno != head else part_of_line(head, 1)
            yield Statement(first, max(last, statement.lineno), condition, *function)
            for part, of_part in inner:
                yield from self._body_statements(part, of_part or condition, function, statement.lineno)
            if isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], _LEAVES):
                condition = self._not(statement.test)

    def _parts(self, node: ast.stmt) -> Iterator[tuple[list[ast.stmt], str]]:
        """Yield the bodies within a statement, each with its condition; "" for that of the statement itself."""
        if isinstance(node, ast.If | ast.While):
            yield node.body, self._shorten(self._source_text(node.test))
            yield node.orelse, self._not(node.test)
        elif isinstance(node, ast.For | ast.AsyncFor):
            yield node.body, self._shorten(f"for {self._source_text(node.target)} in {self._source_text(node.iter)}")
            yield node.orelse, ""
        elif isinstance(node, ast.Match):
            for case in node.cases:
                yield case.body, self._shorten(f"case {self._source_text(case.pattern)}")
        elif isinstance(node, ast.With | ast.AsyncWith):
            yield node.body, ""
        elif isinstance(node, ast.Try | ast.TryStar):
            yield node.body, ""
            for handler in node.handlers:
                yield handler.body, self._shorten(f"except {self._source_text(handler.type)}".rstrip())
            yield node.orelse, ""
            yield node.finalbody, ""

    def _source_text(self, node: ast.AST | None) -> str:
        return " ".join((ast.get_source_segment(self._text, node) or "").split()) if node is not None else ""

    def _not(self, test: ast.expr) -> str:
        return self._shorten(
            f"not {self._source_text(test)}" if isinstance(test, _SIMPLE) else f"not ({self._source_text(test)})"
        )

    @staticmethod
    def _shorten(text: str) -> str:
        return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


_SIMPLE = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


def _compiles(node: ast.AST) -> bool:
    """Return whether a node is ``torch.compile``, or compiles TorchScript."""
    return isinstance(node, ast.Attribute) and node.attr in ("compile", "script") and "torch" in ast.unparse(node.value)


def _begin(statement: ast.stmt) -> int:
    return min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])


@functools.lru_cache(64)
def _lines_with_code(file: Path) -> frozenset[int]:
    """Return the lines of a file, and their parts, that have bytecode; Python omits branches that it optimizes away."""
    pending = list[CodeType]()
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        pending.append(compile(file.read_bytes(), str(file), "exec", dont_inherit=True))
    lines = set[int]()
    while pending:
        code = pending.pop()
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        lines.update(line for _, _, line in code.co_lines() if line is not None)
        lines.update(itertools.chain.from_iterable(parts_of_code(str(file), code).values()))
    return frozenset(lines)


@contextlib.contextmanager
def watch_remote(function: Elsewhere, device: str) -> Iterator[Executed]:
    """Watch the lines of a function in another process inside the block."""
    executed = Executed()
    executed.watch(function.file, function.function, device, function)
    yield executed


@contextlib.contextmanager
def watch(implementation: Any, device: str) -> Iterator[Executed]:
    """Watch an implementation's lines inside the block."""
    executed = Executed()
    target = getattr(implementation, "__self__", None)
    target = target if isinstance(target, type) else inspect.unwrap(implementation)
    recorder.users += 1
    try:
        for candidate in (target, type(target)):
            with contextlib.suppress(TypeError, OSError):
                executed.watch(Path(inspect.getfile(candidate)).resolve(), getattr(candidate, "__name__", ""), device)
                break
        yield executed
    finally:
        recorder.users -= 1
        recorder.close()


@contextlib.contextmanager
def bad_input(implementation: Any) -> Iterator[None]:
    """Let calls inside the block, all with bad input, execute no lines but those of branches that raise an error.

    A line that only bad input reaches was never compared with anything. Lines of kernels count as executed.
    """
    elsewhere = implementation if hasattr(type(implementation), "forget_lines") else None

    def lines() -> dict[str, set[int]]:
        return recorder.lines() if elsewhere is None else elsewhere.lines()[0]

    former = {file: {*hits} for file, hits in lines().items()}
    try:
        yield
    finally:
        new = {file: hits - former.get(file, set()) for file, hits in lines().items()}
        error_hits = {file: {n for n in hits if n % PARTS not in error_lines(file)} for file, hits in new.items()}
        if any(error_hits.values()):
            (recorder.forget if elsewhere is None else elsewhere.forget_lines)(error_hits)


@functools.lru_cache(64)
def error_lines(file: str) -> frozenset[int]:
    """Return the lines of a file's branches that end with `raise`, and of the functions that only they name."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    nodes_of_file = [*ast.walk(tree)]
    blocks = (getattr(node, name, None) for node in nodes_of_file for name in ("body", "orelse", "finalbody"))
    raising = [block for block in blocks if isinstance(block, list) and block and isinstance(block[-1], ast.Raise)]
    bodies = {id(node.body) for node in nodes_of_file if isinstance(node, ast.FunctionDef) and _has_branches(node)}
    nodes = [node for block in raising for node in (block[-1:] if id(block) in bodies else block)]
    uses = Counter(map(name_of, nodes_of_file))
    uses.subtract(name_of(node) for node in {id(n): n for top in nodes for n in ast.walk(top)}.values())
    nodes += [node for node in nodes_of_file if isinstance(node, ast.FunctionDef) and uses.get(node.name) == 0]
    return frozenset(line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _has_branches(function: ast.FunctionDef) -> bool:
    return any(hasattr(statement, "body") for statement in function.body)
