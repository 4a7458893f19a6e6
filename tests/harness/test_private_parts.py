"""Only `fourfold.compat` uses private parts of other libraries."""

import ast
import functools
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPAT = ROOT / "fourfold" / "compat"
OWN = {"fourfold", "impls", "oracles", "properties", "tests", "conftest", "known_wrong"}
# Named in the documentation, in spite of the underscore.
DOCUMENTED = {"os._exit"}
# Private without an underscore: no documentation names their owners.
UNDERSCORELESS = re.compile(
    r"CompiledKernel|KernelParam|DispatchKey|redispatch|overloadpacket|workerinput|maxworkerrestart|reprcrash|has_error"
    r"|_pytest"
)
EXEMPT = {
    # Triton's interpreter: its parts have a table and a contract test of their own, see interpreter/parts.py.
    "fourfold/backends/triton/interpreter/corrections.py",
    "fourfold/backends/triton/interpreter/arithmetic.py",
    "fourfold/backends/triton/interpreter/marks.py",
    "fourfold/backends/triton/interpreter/memory.py",
    # A mode counts what an operator dispatches; calls of tensors with the negative bit go to the dispatcher.
    "tests/harness/test_known_calls.py",
    "tests/harness/test_operators.py",
    # Functions of lists, as optimizers in definitions call them: torch documents them with an underscore.
    "tests/harness/test_torch_running_error.py",
}
# Names with an underscore that are documented: those of named tuples, and of the module sys.
DOCUMENTED_NAMES = {"_asdict", "_replace", "_fields", "_current_frames"}
# These are about private parts.
ABOUT_THEM = {"tests/harness/test_compat.py", "tests/harness/test_private_parts.py"}
IMPORTS = (ast.Import, ast.ImportFrom)
FOLDERS = ("fourfold", "impls", "oracles", "properties", "tests", "docs")


@functools.cache
def nodes_by_type(tree: ast.AST) -> dict[type[ast.AST], list[ast.AST]]:
    """Return all nodes of a tree by their type: several functions go through a few types each."""
    nodes: dict[type[ast.AST], list[ast.AST]] = {}
    for node in ast.walk(tree):
        nodes.setdefault(type(node), []).append(node)
    return nodes


def nodes_of(tree: ast.AST, *types: type[ast.AST]) -> Iterator[ast.AST]:
    """Return the nodes of these types."""
    return itertools.chain.from_iterable(nodes_by_type(tree).get(each, ()) for each in types)


def is_private(name: str) -> bool:
    return re.match(r"_[^_]", name) is not None and name not in DOCUMENTED_NAMES


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that the code defines."""
    for node in nodes_of(tree, ast.FunctionDef, ast.ClassDef, ast.Name, ast.Attribute):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own_object(node.value):
            yield node.attr


def is_own_object(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def imported_names(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield imports of other libraries' parts: the name here, the part, and the imported name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if top not in OWN:
                yield (alias.asname, alias.name, alias.name) if alias.asname else (top, top, alias.name)
    elif isinstance(node, ast.ImportFrom) and not node.level and str(node.module).partition(".")[0] not in OWN:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield alias.asname or alias.name, full, full


def names_of_others(tree: ast.AST) -> dict[str, str]:
    """Return the names of other libraries' parts, imported or assigned, and their full names."""
    found = {name: full for node in nodes_of(tree, *IMPORTS) for name, full, _ in imported_names(node)}
    for _ in range(2):  # a name for a part of one, and a name for a part of that
        for node in nodes_of(tree, ast.Assign):
            if full := full_name(node.value, found):
                found |= {target.id: full for target in node.targets if isinstance(target, ast.Name)}
    return found


def full_name(node: ast.AST, known: dict[str, str]) -> str | None:
    """Return a part's full name, such as ``torch.ops.aten``; None unless it is another library's."""
    if isinstance(node, ast.Attribute):
        before = full_name(node.value, known)
        return f"{before}.{node.attr}" if before else None
    return known.get(node.id) if isinstance(node, ast.Name) else None


def parse_code(text: str) -> ast.AST | None:
    """Return the syntax tree of a text of several lines; None if it is not code."""
    if "import " in text and "\n" in text:
        try:
            return ast.parse(textwrap.dedent(text))
        except SyntaxError:
            return None
    return None


def documents(tree: ast.AST) -> set[int]:
    """Return the ids of the nodes that are documentation."""
    owners = nodes_of(tree, ast.Module, ast.ClassDef, ast.FunctionDef)
    return {id(owner.body[0].value) for owner in owners if ast.get_docstring(owner) is not None}  # type: ignore


def private_parts(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Yield the line and the name of each use of another library's private part.

    Args:
        tree: of the code.
        own: private names that are this project's.
    """
    others, text = names_of_others(tree), documents(tree)
    for node in nodes_of(tree, *IMPORTS, ast.Attribute, ast.Call, ast.Constant):
        if isinstance(node, IMPORTS):
            names = [full for _, _, full in imported_names(node)]
            found = [name for name in names if any(map(is_private, name.split("."))) or UNDERSCORELESS.search(name)]
        elif isinstance(node, ast.Attribute):
            found = [name for name in [private_attribute(node, others, own)] if name]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            named = [str(argument.value) for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
            found = [name for name in named if is_private(name) and name not in own]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in text:
            code = parse_code(node.value)
            found = (
                list(private_parts(code, own | set(defined_names(code))))
                if code
                else UNDERSCORELESS.findall(node.value)
            )
        else:
            continue
        yield from (f"line {node.lineno}: {name}" for name in found)


def private_attribute(node: ast.Attribute, others: dict[str, str], own: set[str]) -> str | None:
    """Return the name of a private attribute of another library's object, as far as the code shows whose it is."""
    full = full_name(node, others)
    private = is_private(node.attr) and (full is not None or node.attr not in own)
    if (private or UNDERSCORELESS.fullmatch(node.attr)) and full not in DOCUMENTED:
        return full or ast.unparse(node)
    return None


def uses_by_file() -> dict[str, list[str]]:
    """Return each file's uses of private parts of other libraries.

    One test parses all files: names that one of them defines are this project's in the others.
    """
    files = [ROOT / "conftest.py", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"), path.name)
        for path in files
        if COMPAT not in path.parents
    }
    own, found = set[str](), {}
    for tree in trees.values():
        own |= {name for name in defined_names(tree) if is_private(name)}
        nodes_by_type.cache_clear()  # the nodes of all files take 200 MB
    for file, tree in trees.items():
        if file not in ABOUT_THEM:
            found[file] = list(private_parts(tree, own))
            nodes_by_type.cache_clear()
    return found


def test_private_parts_of_other_libraries_are_used_in_compat_and_in_exempt_files_alone() -> None:
    used = {file: uses for file, uses in uses_by_file().items() if uses}
    assert {file: uses for file, uses in used.items() if file not in EXEMPT} == {}
    assert used.keys() == EXEMPT, "a file that uses none needs no exemption"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch\ntorch._C._cuda_getDevice()", {"torch._C._cuda_getDevice", "torch._C"}),
        ("import torch._dynamo", {"torch._dynamo"}),
        ("import torch.utils._pytree as pytree", {"torch.utils._pytree"}),
        ("from torch.utils._pytree import tree_leaves", {"torch.utils._pytree.tree_leaves"}),
        ("from torch.utils import _pytree", {"torch.utils._pytree"}),
        ("def f():\n    from _pytest.main import Failed", {"_pytest.main.Failed"}),
        ("from torch import autograd as a\na.forward_ad._current_level", {"torch.autograd.forward_ad._current_level"}),
        ("import torch\nATEN = torch.ops.aten\nADD = ATEN.add\nATEN._to_copy", {"torch.ops.aten._to_copy"}),
        ("import torch\ntorch.cuda._compile", {"torch.cuda._compile"}),
        ("def f(operator):\n    return operator._schema", {"operator._schema"}),
        ("getattr(thing, '_schema', None)", {"_schema"}),
        ("def f(config):\n    return hasattr(config, 'workerinput')", {"workerinput"}),
        ("def f(config):\n    config.workerinput['x']", {"config.workerinput"}),
        ("def f(line):\n    return '/_pytest/' in line", {"_pytest"}),
        ("SCRIPT = '''\nimport torch\ntorch.cuda._sleep(1)\n'''", {"line 3: torch.cuda._sleep"}),
        ("import os\nos._exit(0)", set()),
        ("from . import launch\nlaunch._compile(1)", set()),
        ("from fourfold.backends import launch\nlaunch._compile(1)", set()),
        ("class A:\n    def __init__(self):\n        self._compile = 1\n        self._compile.__name__", set()),
        ('"""About torch._C and _pytest."""\n\n\ndef f():\n    """About workerinput."""', set()),
    ],
)
def test_a_private_part_is_seen(code: str, found: set[str]) -> None:
    seen = private_parts(ast.parse(code), {"_compile"})
    assert {re.sub(r"^line \d+: ", "", name, count=1) for name in seen} == found
