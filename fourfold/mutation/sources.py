"""The files of an operation's kernels, which of their functions it uses, and their mutants."""

import ast
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
    """Return the texts of an operation's kernel files and of the shared files that it uses, by path.

    A shared file lies beside the operations' folders. An operation uses it if one of its own files names it, or if a
    header that it uses includes it.
    """
    suffixes = OF_BACKENDS[backend]
    folder = KernelPackage.of(operation).folder
    own_files = {path: path.read_text() for path in sorted((folder / operation).iterdir()) if path.suffix in suffixes}
    shared = {path: path.read_text() for path in sorted(folder.iterdir()) if path.suffix in suffixes}
    used = {path: text for path, text in shared.items() if any(path.stem in other for other in own_files.values())}
    while more := {p: shared[p] for p in shared.keys() - used.keys() if any(f'"{p.name}"' in t for t in used.values())}:
        used |= more
    return {
        str(path.relative_to(folder)): text
        for path, text in {**own_files, **used}.items()
        if backend == "cuda" or "@triton.jit" in text
    }


def reachable_functions(operation: str, backend: str, texts: dict[str, str]) -> set[tuple[str, str]]:
    """Return (file, name) of each function of an operation's own files, and of each shared function that they reach.

    A shared function is reached if the operation's files, or a reached function, name it. So it is if a function of a
    shared Python module does, through which the operation's module launches its kernels.
    """
    own_files = {file for file in texts if pathlib.PurePath(file).parts[0] == operation}
    words = {word for file in own_files for word in re.findall(r"\w+", texts[file])} | _words_of_launchers(
        operation, backend
    )
    reachable: set[tuple[str, str]] = set()
    others = [(file, *function) for file, text in texts.items() for function in FUNCTIONS[backend](text)]
    while True:
        # A method also needs the name of its struct. An operator is used without its name.
        new = [
            (file, name, struct, body)
            for file, name, struct, body in others
            if file in own_files or ((name in words or not name.isidentifier()) and (not struct or struct in words))
        ]
        if not new:
            return reachable
        reachable |= {(file, name) for file, name, _, _ in new}
        words |= {word for *_, body in new for word in re.findall(r"\w+", body)}
        others = [function for function in others if function not in new]


def _words_of_launchers(operation: str, backend: str) -> set[str]:
    """Return the words of the shared functions, other than kernels, that an operation's module reaches by name."""
    folder = KernelPackage.of(operation).folder
    module = folder / operation / f"{MODULES[backend]}.py"
    text = module.read_text() if module.exists() else ""
    others = [
        node
        for path in sorted(folder.glob("*.py"))
        if re.search(rf"\b{path.stem}\b", text)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.decorator_list
    ]
    named, words = set(re.findall(r"\w+", text)), set[str]()
    while new := [node for node in others if node.name in named]:
        others = [node for node in others if node not in new]
        # Its docstring may name what it does not reach.
        words |= {word for node in new for word in re.findall(r"\w+", ast.unparse(ast.Module(node.body[1:], [])))}
        named |= words
    return words


def mutants_of_files(texts: Mapping[str, str], backend: str) -> list[Mutant]:
    """Return all mutants of some files, including those of functions that only other operations use."""
    return [mutant for file, text in texts.items() for mutant in MAKERS[backend](file, text)]
