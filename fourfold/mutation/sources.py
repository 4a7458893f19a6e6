"""The files of an operation's kernels, which of their functions it uses, and their mutants."""

import ast
import functools
import pathlib
import re
from collections.abc import Mapping

from fourfold.backends import MODULES
from fourfold.backends.cuda.declarations import SUFFIXES
from fourfold.mutation.cuda_mutants import cuda_functions, cuda_mutants
from fourfold.mutation.mutant import Mutant
from fourfold.mutation.trial import KernelPackage
from fourfold.mutation.triton_mutants import triton_functions, triton_mutants

MAKERS = {"triton": triton_mutants, "cuda": cuda_mutants}
FUNCTIONS = {"triton": triton_functions, "cuda": cuda_functions}
OF_BACKENDS = {"triton": (".py",), "cuda": SUFFIXES}


def sources(operation: str, backend: str) -> dict[str, str]:
    """Return the texts of an operation's kernel files and of those of others that it uses, by path.

    It uses those beside the modules that its own module reaches, and a shared file beside the operations' folders if
    one of these names it, or if a header that it uses includes it.
    """
    suffixes = OF_BACKENDS[backend]
    folder = KernelPackage.of(operation).folder
    folders = dict.fromkeys((folder / operation, *(path.parent for path in _reached(operation, backend)[1])))
    code = {
        path: path.read_text()
        for directory in folders
        for path in sorted(directory.iterdir())
        if directory != folder and path.suffix in suffixes
    }
    shared = {path: path.read_text() for path in sorted(folder.iterdir()) if path.suffix in suffixes}
    code |= {path: text for path, text in shared.items() if any(path.stem in t for t in code.values())}
    while new := {p: s for p, s in shared.items() if p not in code and any(f'"{p.name}"' in t for t in code.values())}:
        code |= new
    return {
        str(path.relative_to(folder)): text for path, text in code.items() if backend == "cuda" or "@triton.jit" in text
    }


def reachable_functions(operation: str, backend: str, texts: dict[str, str]) -> set[tuple[str, str]]:
    """Return (file, name) of each function of an operation's own files, and of each other function that they reach.

    A function is reached if the operation's files, or a reached function, name it. So it is if a function or class of
    another Python module does, through which the operation's module launches its kernels. In CUDA C++ all kernels of
    such a module are reached, because it may put their names together.
    """
    words, modules = _reached(operation, backend)
    packages = {path.parent.name for path in modules if backend == "cuda" and path.stem == MODULES[backend]}
    own_files = {file for file in texts if pathlib.PurePath(file).parts[0] in {operation, *packages}}
    words = words.union(*(re.findall(r"\w+", texts[file]) for file in own_files))
    reachable: set[tuple[str, str]] = set()
    functions = [(file, *function) for file, text in texts.items() for function in FUNCTIONS[backend](text)]
    while True:
        # A method also needs the name of its struct. An operator is used without its name.
        new = [
            (file, name, struct, body)
            for file, name, struct, body in functions
            if file in own_files or ((name in words or not name.isidentifier()) and (not struct or struct in words))
        ]
        if not new:
            return reachable
        reachable |= {(file, name) for file, name, _, _ in new}
        words |= {word for *_, body in new for word in re.findall(r"\w+", body)}
        functions = [function for function in functions if function not in new]


def _reached(operation: str, backend: str) -> tuple[set[str], list[pathlib.Path]]:
    """Return what an operation's module reaches by imports within its package.

    Returns:
        The words of all of that module, and of what it reaches of others, except for kernels. And the modules' paths.
    """
    words: set[str] = set()
    start = KernelPackage.of(operation).folder / operation / f"{MODULES[backend]}.py"
    pending, visited = [(start, "")], set[tuple[pathlib.Path, str]]()
    while pending:
        path, name = pending.pop()
        if (path, name) in visited or not path.exists():
            continue
        visited.add((path, name))
        values, imports = _module(path.read_text())
        names = set[str]().union(*(words for bound, words in values if name in ("", bound)))
        words |= names
        pending += [(path, word) for word in names]
        for node in imports:
            place = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for alias in node.names:
                if name == "" or (alias.asname or alias.name) in names:
                    module = place / f"{alias.name}.py"
                    members = [(module, word) for word in names] if module.exists() else []
                    pending += members or [(place.with_suffix(".py"), alias.name)]
    return words, sorted({path for path, _ in visited})


@functools.cache
def _module(text: str) -> tuple[list[tuple[str, set[str]]], list[ast.ImportFrom]]:
    """Return the names that a module binds, each with the words of its value, and its relative imports."""
    body = ast.parse(text).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and node.level]
    return [value for node in body for value in _values(node)], imports


def _values(node: ast.stmt) -> list[tuple[str, set[str]]]:
    """Return the names that a statement of a module binds, each with the words of its value; of no kernel."""
    match node:
        case ast.FunctionDef() | ast.ClassDef() if not any(
            "triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            # Its docstring may name what it does not reach.
            names, value = [node.name], ast.unparse(ast.Module(node.body[ast.get_docstring(node) is not None :], []))
        case ast.Assign():
            names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            value = ast.unparse(node.value)
        case _:
            return []
    return [(name, set(re.findall(r"\w+", value))) for name in names]


def mutants_of_files(texts: Mapping[str, str], backend: str) -> list[Mutant]:
    """Return all mutants of some files, including those of functions that only other operations use."""
    return [mutant for file, text in texts.items() for mutant in MAKERS[backend](file, text)]
