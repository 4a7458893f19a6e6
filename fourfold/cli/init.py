"""``fourfold init``: write a test file for kernels of the user's, and a workflow that runs it."""

import argparse
import ast
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fourfold.cli.listing import arguments_of
from fourfold.cli.source import NotThere, Source, require_operation
from fourfold.operations import registry

WORKFLOW = Path(".github/workflows/fourfold.yml")
# Folders without kernels of the user's.
_OTHERS = {"build", "dist", "node_modules", "site-packages", "tests", "venv"}
# A function with one of these in its name computes a gradient, and no known operation.
_GRADIENT = re.compile(r"backward|bwd|grad")
_WORKFLOW = """\
# Every kernel through every check, on a machine without a GPU: Triton's kernels are interpreted.
name: fourfold
on: [push, pull_request]
permissions:
  contents: read
jobs:
  kernels:
    runs-on: ubuntu-latest
    timeout-minutes: 60
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: pip install fourfold{install}
      - run: pytest -n auto {tests} --junitxml fourfold.xml
      - uses: actions/upload-artifact@v4
        if: ${{{{ !cancelled() }}}}
        with:
          name: fourfold
          path: fourfold.xml
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "kernel",
        nargs="?",
        metavar="FILE.py[:FUNCTION]",
        help="a function with a kernel, or all of a file; without it, all that are found in this folder",
    )
    add("--as", dest="operation", metavar="OPERATION", help="what it computes; by default as its name says")
    add("--force", action="store_true", help="replace existing files")
    add("--no-workflow", action="store_true", help="write no workflow for GitHub")


def command(args: argparse.Namespace) -> int:
    """Write the files; return 0, or 2 if there is no kernel or a file is there already."""
    try:
        if args.operation:
            require_operation(args.operation)
        kernels = choose_sources(args.kernel)
    except NotThere as error:
        args.error(str(error))
    cwd, files = Path.cwd(), dict[Path, str]()
    for source, functions in kernels:
        files[source.file.parent / f"test_{source.file.stem}.py"] = test_file(source, functions, args.operation or "")
    root = next((folder for folder in (cwd, *cwd.parents) if (folder / ".git").exists()), cwd)
    if not args.no_workflow:
        names = " ".join(str(file.resolve().relative_to(root) if root != cwd else file) for file in files)
        install = " -e ." if _is_package(root / "pyproject.toml") else ""
        files[root / WORKFLOW] = _WORKFLOW.format(install=install, tests=names)
    if existing := [os.path.relpath(file) for file in files if file.exists() and not args.force]:
        args.error(f"{', '.join(existing)} is there already: --force replaces it")
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        print(f"wrote {os.path.relpath(file)}")
    for file, text in files.items():
        if "NotImplementedError" in text:
            print(f"{file}: write the formula of each kernel in place of NotImplementedError")
    print(f"next: pytest {next(iter(files))}")
    return 0


def _is_package(project: Path) -> bool:
    return project.is_file() and "project" in tomllib.loads(project.read_text(encoding="utf-8"))


def choose_sources(text: str | None) -> list[tuple[Source, list[str]]]:
    """Return the files with the functions that ``FILE.py[:FUNCTION]`` names; all of this folder if it is None.

    Raises:
        NotThere: a file or a function is not there, or there is no kernel.
    """
    if text is not None:
        place, colon, function = text.partition(":")
        source = Source.of(Path(place))
        if colon:
            source.require(function)
        pairs = [(source, [function] if colon else source.kernels())]
    else:
        pairs = [(source, source.kernels()) for source in _sources(Path())]
    pairs = [(source, functions) for source, functions in pairs if functions]
    if not pairs:
        raise NotThere(f"no function of {text or 'this folder'} launches a Triton kernel: name it, as FILE.py:FUNCTION")
    return pairs


def _sources(folder: Path) -> Iterator[Source]:
    """Yield the Python files of a folder that name Triton, without tests and installed packages."""
    for file in sorted(folder.rglob("*.py")):
        hidden = any(part in _OTHERS or part.startswith(".") for part in file.parts)
        if not hidden and not file.name.startswith("test_") and "triton" in file.read_text("utf-8", errors="replace"):
            try:
                yield Source.of(file)
            except NotThere as error:
                print(f"fourfold init: {error}", file=sys.stderr)


def test_file(source: Source, functions: Sequence[str], operation: str) -> str:
    """Return the text of the tests of a file's functions."""
    imports, bodies = {"import fourfold"}, []
    for function in functions:
        node, name = source.definitions.get(function), "".join(part.title() for part in function.split("_"))
        references = [f"{source.file}:{place}" for place in source.operations() if _names(function, place)]
        reference = operation or next(iter(references), "") or likely(function, node)
        place, colon, object_name = reference.rpartition(":")
        if colon:
            imports.add(f"from {module_of(Path(place))} import {object_name}")
            reference = object_name
        elif reference:
            reference = repr(reference).replace("'", '"')
        else:
            imports |= {"import torch", "from fourfold import tensor, values"}
            reference = f"{function}_in_torch"
            bodies.append(definition(function, node))
        bodies.append(f"Test{name} = fourfold.suite({function}, {reference})\n")
    kernels = f"from {module_of(source.file)} import {', '.join(functions)}"
    modules = sorted(line for line in imports if line.startswith("import"))
    names = sorted(line for line in imports if line.startswith("from"))
    head = f'"""Fourfold checks the kernels of {source.file.name}: one test for each check and dtype."""\n'
    return "\n".join([head, *modules, *names, "", kernels, "\n", "\n\n".join(bodies)])


def likely(function: str, node: ast.AST | None) -> str:
    """Return the known operation that the name of a function contains, if it takes as many arguments; else ""."""
    if _GRADIENT.search(function):
        return ""
    for name in sorted(registry.files(), key=len, reverse=True):
        if _names(function, name):
            arguments = arguments_of(name)
            if not isinstance(node, ast.FunctionDef):
                return name
            args = node.args.args
            return name if len(args) - len(node.args.defaults) <= len(arguments) and len(args) <= len(arguments) else ""
    return ""


def _names(function: str, operation: str) -> bool:
    """Return whether the words of a function's name contain those of an operation's, as fused_softmax does."""
    return f"_{operation}_" in f"_{function}_"


def module_of(file: Path) -> str:
    """Return the name by which a test beside a file imports it."""
    file, parts = file.resolve(), [file.stem]
    for folder in file.parents:
        if not (folder / "__init__.py").is_file():
            break
        parts.insert(0, folder.name)
    return ".".join(parts)


def definition(function: str, node: Any) -> str:
    """Return the skeleton of a definition with the arguments of a function."""
    arguments, defaults_of_last = (
        (node.args.args, node.args.defaults) if isinstance(node, ast.FunctionDef) else ([ast.arg("x")], [])
    )
    defaults: list[ast.expr | None] = [*[None] * (len(arguments) - len(defaults_of_last)), *defaults_of_last]
    declarations, signature = [], []
    for argument, default in zip(arguments, defaults):
        number = argument.annotation is not None and ast.unparse(argument.annotation) in ("int", "float", "bool")
        if default is None and not number:
            declarations.append(f'{argument.arg}=tensor("rows cols")')
        else:
            declarations.append(f"{argument.arg}=values({ast.unparse(default) if default else 1})")
        signature.append(argument.arg + (f"={ast.unparse(default)}" if default else ""))
    return f"""\
# The shape of each tensor, and numbers that each parameter may be.
@fourfold.operation({", ".join(declarations)})
def {function}_in_torch({", ".join(signature)}):
    raise NotImplementedError("write what {function} computes, in torch")
"""
