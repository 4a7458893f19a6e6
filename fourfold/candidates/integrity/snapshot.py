"""Detection of changes to the program that judges a candidate: its functions, classes, records and tables.

A `Snapshot` holds the state of modules before the candidate was loaded: the object of each name, the code of each
function, the values in each record and table. `changes` compares them, names the differences, and restores the state.
`fourfold.instruments.tampering` checks fewer names, around every call.
"""

import builtins
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

_ABSENT = object()
_BUILTINS = frozenset(vars(builtins))
# Containers in a module that are followed, because their contents also affect judging.
_TABLES = (dict, MappingProxyType, tuple, frozenset)
# The depth to which tables and records are followed.
_DEPTH = 6


def modules_of(*packages: str) -> list[ModuleType]:
    """Return all loaded modules of these packages."""
    modules = ((name, module) for name, module in list(sys.modules.items()) if isinstance(module, ModuleType))
    return [module for name, module in modules if name.partition(".")[0] in packages]


class Snapshot:
    """The present state of modules and objects.

    Args:
        modules: their functions, and their classes with all methods.
        with_tables: modules that also include tables and records, which have names in capital letters.
        objects: further objects, such as records.
    """

    def __init__(
        self,
        modules: Iterable[ModuleType] = (),
        with_tables: Iterable[ModuleType] = (),
        objects: Iterable[tuple[str, Any]] = (),
    ) -> None:
        # A namespace, its name, and the compared names in it with their values.
        self._names: list[tuple[Any, str, list[tuple[str, Any]]]] = []
        self._code: list[tuple[FunctionType, str, tuple[Any, ...]]] = []
        self._tables: list[tuple[dict, str, dict]] = []
        self._modules: list[tuple[str, ModuleType]] = []
        # Classes and modules: their name, the names in them, and names that are looked up elsewhere if missing.
        self._namespaces: list[tuple[Any, str, frozenset[str], frozenset[str]]] = []
        self._objects: dict[int, Any] = {}  # by id, the objects kept alive here
        for module in modules:
            self._add_module(module, False)
        for module in with_tables:
            self._add_module(module, True)
        for name, value in objects:
            self._add(value, name, _DEPTH)

    def _add_module(self, module: ModuleType, with_tables: bool) -> None:
        name = module.__name__
        self._modules.append((name, module))
        of_module = [(key, value) for key, value in vars(module).items() if _is_judging(key, value, with_tables)]
        self._names.append((module, name, of_module))
        if with_tables:
            self._namespaces.append((module, name, frozenset(vars(module)), _BUILTINS))
        for key, value in of_module:
            if getattr(value, "__module__", name) == name or not isinstance(value, type | FunctionType):
                self._add(value, f"{name}.{key}", _DEPTH)

    def _add(self, value: Any, name: str, depth: int) -> None:
        if depth == 0 or id(value) in self._objects:
            return
        self._objects[id(value)] = value
        if isinstance(value, FunctionType):
            self._code.append((value, name, _code_of(value)))
            if wrapped := getattr(value, "__wrapped__", None):
                self._add(wrapped, name, depth)
        elif isinstance(value, staticmethod | classmethod):
            self._add(value.__func__, name, depth)
        elif isinstance(value, property):
            for part in filter(None, (value.fget, value.fset)):
                self._add(part, name, depth)
        elif isinstance(value, type):
            self._add_class(value, name, depth)
        elif isinstance(value, dict | MappingProxyType):
            self._add_table(value, name, depth)
        elif isinstance(value, tuple | frozenset):
            for number, item in enumerate(value):
                self._add(item, f"{name}[{number}]", depth - 1)
        elif dataclasses.is_dataclass(value) and vars(type(value))["__dataclass_params__"].frozen:
            fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
            self._names.append((value, name, fields))
            for key, item in fields:
                self._add(item, f"{name}.{key}", depth - 1)

    def _add_class(self, kind: type, name: str, depth: int) -> None:
        methods = [(key, method) for key, method in vars(kind).items() if _is_method(key, method)]
        self._names.append((kind, name, methods))
        inherited = frozenset(key for base in kind.__mro__[1:-1] for key in vars(base))
        self._namespaces.append((kind, name, frozenset(vars(kind)), inherited))
        for key, method in methods:
            self._add(method, f"{name}.{key}", depth)

    def _add_table(self, table: Any, name: str, depth: int) -> None:
        contents = gc.get_referents(table) if isinstance(table, MappingProxyType) else [table]
        for behind in contents:
            if isinstance(behind, dict):
                self._tables.append((behind, name, dict(behind)))
        for key, item in table.items():
            self._add(item, f"{name}[{key!r}]", depth - 1)

    @property
    def modules(self) -> int:
        """Return the number of modules in the snapshot."""
        return len(self._modules)

    def changes(self) -> list[str]:
        """Return the names of all changes, and undo them."""
        pairs = list(self._changes())
        for _, put_back in pairs:
            put_back()
        return list(dict.fromkeys(name for name, _ in pairs))

    @property
    def is_of_now(self) -> bool:
        """Return whether nothing has changed."""
        return next(self._changes(), None) is None

    def _changes(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the name of each change, and a function that undoes it."""
        for name, module in self._modules:
            if sys.modules.get(name) is not module:
                yield name, partial(sys.modules.__setitem__, name, module)
        for function, name, code in self._code:
            if _code_of(function) != code:
                yield name, partial(_set_code, function, code)
        for owner, name, attributes in self._names:
            current = vars(owner)
            set_attribute = type.__setattr__ if isinstance(owner, type) else object.__setattr__
            for key, value in attributes:
                if current.get(key, _ABSENT) is not value:
                    yield f"{name}.{key}", partial(set_attribute, owner, key, value)
        for owner, name, keys, inherited in self._namespaces:
            if len(vars(owner)) > len(keys):
                for key in (vars(owner).keys() - keys) & inherited:
                    yield f"{name}.{key}", partial(delattr, owner, key)
        for table, name, content in self._tables:
            if len(table) != len(content) or any(table.get(key, _ABSENT) is not item for key, item in content.items()):
                yield name, partial(_set_content, table, content)


def functions_of_file(file: Path, modules: Iterable[ModuleType]) -> list[str]:
    """Return the names of functions in modules and their classes that come from a given file, such as a candidate's."""
    text, names = str(file), list[str]()
    for module in modules:
        if getattr(module, "__file__", None) == text:
            continue
        for key, value in list(vars(module).items()):
            members = {key: value}
            if isinstance(value, type) and value.__module__ == module.__name__:
                members = {f"{key}.{name}": m for name, m in vars(value).items()}
            of_file = (name for name, m in members.items() if isinstance(m, FunctionType) and _is_of(m, text))
            names += [f"{module.__name__}.{name}" for name in of_file]
    return names


def _is_of(function: FunctionType, file: str) -> bool:
    return function.__code__.co_filename == file


def _set_code(function: FunctionType, code: tuple[Any, ...]) -> None:
    function.__code__, function.__defaults__, function.__kwdefaults__ = code


def _set_content(table: dict, content: dict) -> None:
    table.clear()
    table.update(content)


def _code_of(function: FunctionType) -> tuple[Any, ...]:
    # Defaults are compared by identity first: a tuple's comparison uses `is` for each element.
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _is_judging(name: str, value: Any, with_tables: bool) -> bool:
    """Return whether a module's name affects judging: functions, classes, and constants that hold others."""
    if isinstance(value, type | FunctionType):
        return True
    return (
        with_tables and name.isupper() and not name.startswith("_") and (isinstance(value, _TABLES) or callable(value))
    )


def _is_method(name: str, value: Any) -> bool:
    kinds = FunctionType | staticmethod | classmethod | property
    return isinstance(value, kinds) or (name.startswith("__") and callable(value) and not isinstance(value, type))
