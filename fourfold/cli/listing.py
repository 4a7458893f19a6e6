"""``fourfold list``: the known operations, or the kernels and operations of files."""

import argparse
import ast
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fourfold.cli.parser import add_json
from fourfold.cli.source import NotThere, Source
from fourfold.engine.tables import table_lines
from fourfold.operations import registry


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.py", help="list what these files define instead")
    add_json(parser, "the list")


def command(args: argparse.Namespace) -> int:
    """Print the list; return 0."""
    try:
        rows = [row for file in args.files for row in rows_of(file)] if args.files else known_operations()
    except NotThere as error:
        args.error(str(error))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
        return 0
    console = Console(highlight=False)
    if not rows:
        print("no kernel and no operation")
    elif console.is_terminal:
        console.print(_table(rows))
    else:
        print(*table_lines([[*rows[0]], *([*row.values()] for row in rows)]), sep="\n")
    return 0


def _table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table that breaks lines within descriptions and arguments, and cuts nothing."""
    table = Table(box=None, pad_edge=False)
    for head in rows[0]:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def known_operations() -> list[dict[str, str]]:
    """Return the name, the arguments and a description of each known operation."""
    return [
        {"operation": name, "arguments": ", ".join(arguments_of(name)), "about": _title(Source.of(file).tree)}
        for name, file in sorted(registry.files().items())
    ]


def rows_of(file: Path) -> list[dict[str, str]]:
    """Return the kernels and operations that a file defines."""
    source = Source.of(file)
    names_of: Mapping[str, list[str]] = {"kernel": source.kernels(), "operation": source.operations()}
    return [{"name": f"{file}:{name}", "kind": kind} for kind, names in names_of.items() for name in names]


def arguments_of(operation: str) -> list[str]:
    """Return the names of a known operation's arguments, from the text of its implementation in torch."""
    try:
        return _arguments(f"{registry.implementations(operation)}.torch_eager", operation)
    except ModuleNotFoundError:
        return []


def _arguments(module: str, name: str) -> list[str]:
    """Return the names of the arguments of a module's function, which it defines or imports from a module beside it."""
    spec = importlib.util.find_spec(module)
    source = Source.of(Path(spec.origin)) if spec and spec.origin else None
    for node in source.tree.body if source else ():
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return [argument.arg for argument in node.args.args]
        if isinstance(node, ast.ImportFrom) and node.level and any(alias.name == name for alias in node.names):
            sibling = importlib.util.resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
            return _arguments(sibling, name)
    return []


def _title(tree: ast.Module) -> str:
    return (ast.get_docstring(tree) or "").partition("\n")[0].removeprefix("The record of ")
