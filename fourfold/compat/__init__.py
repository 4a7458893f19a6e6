"""Every use of another library's private parts, one module per library: ``torch_internals``, ``xdist_internals``.

A private part is one that a release may change without notice: a name with a leading underscore, or an attribute that
the library's documentation does not mention. The functions here have public names and describe their actions in this
project's terms. Nothing else in this project uses a private part; ``tests/harness/test_private_parts.py`` enforces it.

`uses` marks each function with the parts that it relies on. ``tests/harness/test_compat.py`` has a contract test for
each part, named after it, so that a release which changes a part fails there under its name. If a part is missing, the
function's public fallback replaces it; without a fallback, calling the function raises `MissingPart`.

This package imports nothing else of this project.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# The functions that use each part. It grows whenever a module here is imported. Its name is lower case, because
# constants in capital letters are watched for changes by a candidate.
_users: dict[str, list[str]] = {}
# Libraries whose installed name differs from their import name.
_DISTRIBUTIONS = {"xdist": "pytest-xdist", "pytest_benchmark": "pytest-benchmark", "cuda.core": "cuda-core"}


class MissingPart(RuntimeError):
    """The installed version of a library lacks a private part that this project needs."""

    def __init__(self, part: str, user: str) -> None:
        super().__init__(f"{release(part)} has no {part}, which {user} needs: it is private, and may go at any release")


def users_of_parts() -> dict[str, list[str]]:
    """Return the names of the functions that use each part, by part, for the imported modules."""
    return _users


def library_of(part: str) -> str:
    """Return the import name of the library that a part belongs to."""
    libraries = (library for library in _DISTRIBUTIONS if part.startswith(f"{library}."))
    return next(libraries, part.partition(".")[0])


def release(part: str) -> str:
    """Return the library of a part and its version: "torch 2.13.0"."""
    library = library_of(part)
    if library in sys.stdlib_module_names:
        return f"Python {platform.python_version()}"
    name = _DISTRIBUTIONS.get(library, library)
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name}, which is not installed,"


def find(part: str) -> Any:
    """Return the object that a part's name stands for: ``torch.cuda._sleep``.

    For an attribute that only instances have, ``library.Class().attribute``, return the class. Text after a space is a
    remark.

    Raises:
        AttributeError: it is missing.
        ImportError: the library is missing.
    """
    path, *names = re.split(r"[( ]", part)[0].split(".")
    value: Any = importlib.import_module(path)
    for name in names:
        path = f"{path}.{name}"
        if isinstance(value, ModuleType) and name not in vars(value) and "__path__" in vars(value):
            with contextlib.suppress(ModuleNotFoundError):  # the module's __getattr__ may provide it
                importlib.import_module(path)
        value = getattr(value, name)
    return value


def uses(*parts: str, otherwise: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Mark a function with the private parts that it relies on.

    Parts of a library that is not imported yet are checked only when the function is called.

    Args:
        parts: their full names, as `find` takes them.
        otherwise: a public and usually slower function that is used instead if a part is missing. Without one, a call
            of the function then raises `MissingPart`.
    """

    def mark(function: F) -> F:
        user = f"{function.__module__}.{function.__qualname__}"
        for part in parts:
            _users.setdefault(part, []).append(user)
        absent = [part for part in parts if library_of(part) in sys.modules and not exists(part)]
        if absent:
            return cast(F, otherwise or _refusing(function, absent[0], user))
        of_instances = {name: part for part in parts for name in re.findall(r"\w+", part.partition("()")[2])}
        return _guard(function, of_instances, user) if of_instances else function

    return mark


def exists(part: str) -> bool:
    """Return whether the installed version of a library has a part, or the class of an instance's part."""
    try:
        find(part)
    except (AttributeError, ImportError):
        return False
    return True


def _refusing(function: F, part: str, user: str) -> F:
    @functools.wraps(function)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise MissingPart(part, user)

    return cast(F, refuse)


def _guard(function: F, parts: Mapping[str, str], user: str) -> F:
    """Wrap a function so that it raises `MissingPart` if an instance lacks one of these attributes."""

    @functools.wraps(function)
    def guard(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except AttributeError as error:
            part = parts.get(error.name or "")
            if part is None:
                raise
            raise MissingPart(part, user) from error

    return cast(F, guard)
