"""The registry of operations: the packages that hold their records.

Beside ``fourfold.properties``, an entry point of the group ``fourfold.operations`` names a package, say
``mine.properties``. Each module in it that defines an `operation` is one record: ``mine.properties.swish`` describes
``swish``, and ``mine.impls.swish`` holds its implementations. FOURFOLD_OPERATIONS names packages without entry points,
separated by commas.
"""

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from types import ModuleType

GROUP = "fourfold.operations"
VARIABLE = "FOURFOLD_OPERATIONS"
OWN = "fourfold.properties"
RECORD = re.compile(r"^(def )?operation\b", re.MULTILINE)  # a record, or a declared function, in a module


def packages() -> list[str]:
    """Return the names of all packages that hold records, without duplicates."""
    listed = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    return list(dict.fromkeys(name for name in [*listed, OWN, *_installed_packages(tuple(sys.path))] if name))


@functools.cache
def _installed_packages(path: tuple[str, ...]) -> list[str]:
    """Return the packages that entry points name along this path. To read those of every installed package is slow."""
    return sorted(point.value for point in importlib.metadata.entry_points(group=GROUP))


def files() -> dict[str, Path]:
    """Return the file of each record by the name of its operation, without importing any."""
    specs = [importlib.util.find_spec(package) for package in packages()]
    folders = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    paths = (file for folder in folders for file in sorted(folder.glob("*.py")))
    return {
        file.stem: file for file in paths if re.search(r"^(def )?operation\b", file.read_text("utf-8"), re.MULTILINE)
    }


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: "; did you mean softmax?", or "" if none is similar."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def modules(names: Collection[str] | None = None) -> dict[str, ModuleType]:
    """Import each module of the packages that defines an `operation`; return them by full name.

    Args:
        names: the last parts of the names of the modules to import; None for all.
    """
    records = {}
    for package in packages():
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            if names is not None and module.name.rpartition(".")[2] not in names:
                continue
            record = importlib.import_module(module.name)
            if hasattr(record, "operation"):
                records[module.name] = record
    return records


def oracles(record: str, source: str) -> list[ModuleType]:
    """Return the modules of a record's oracle: ``mine.oracles.swish`` for ``mine.properties.swish``, and `source`."""
    package, _, name = record.rpartition(".")
    folder = _sibling_package(package, "oracles")
    if importlib.util.find_spec(folder) and importlib.util.find_spec(f"{folder}.{name}"):
        importlib.import_module(f"{folder}.{name}")
    return [sys.modules[module] for module in dict.fromkeys((f"{folder}.{name}", source)) if module in sys.modules]


def folders_of_implementations() -> list[str]:
    """Return the names of the packages that hold implementations, such as ``mine.impls``, one folder per operation."""
    impls = (_sibling_package(package, "impls") for package in packages())
    return [name for name in impls if importlib.util.find_spec(name)]


def _sibling_package(package: str, name: str) -> str:
    """Return the name of a sibling package: ``mine.impls`` for ``mine.properties``, ``impls`` for ``properties``."""
    parent = package.rpartition(".")[0]
    return f"{parent}.{name}" if parent else name


@functools.cache
def implementations(operation: str) -> str:
    """Return the package that holds an operation's implementations, such as ``mine.impls.swish``.

    Raises:
        ModuleNotFoundError: no package holds implementations of this operation.
    """
    folders = folders_of_implementations()
    for folder in folders:
        if importlib.util.find_spec(f"{folder}.{operation}"):
            return f"{folder}.{operation}"
    raise ModuleNotFoundError(f"there is no {operation} in {', '.join(folders) or 'any package of operations'}")
