"""Modules from files outside of packages, such as candidates. They may import files in their folder."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# The folders of the imported files.
_folders: set[Path] = set()


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function."""
    return function(*args, **kwargs)


def load_file(file: Path, anew: bool = False, run: Callable[..., Any] = call) -> ModuleType:
    """Return the module of a Python file, which may import the modules of its folder.

    It is registered under its path, so that two candidates of one file share the module, and pickling finds it.

    Args:
        file: its absolute path.
        anew: whether to run the file again if it was imported before.
        run: calls the function that runs the file.

    Raises:
        ImportError: the file is no Python file. Exceptions of the file itself propagate.
    """
    name = f"{file.stem}_{abs(hash(str(file)))}"
    if name in sys.modules and not anew:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _siblings(file.parent):
            run(spec.loader.exec_module, module)
    except BaseException:
        del sys.modules[name]
        raise
    return sys.modules[name]


@contextlib.contextmanager
def _siblings(folder: Path) -> Iterator[None]:
    """Let a file import the modules of its folder before all others, as a script may.

    Afterwards, later imports of the file still find modules there, unless another module has the name.
    """
    for name in [name for name in sys.modules if "." not in name and _hides(name, folder)]:
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]
    _folders.add(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def _hides(name: str, folder: Path) -> bool:
    """Return whether a module is the sibling of another file, and would hide one in this folder."""
    file = getattr(sys.modules[name], "__file__", None)
    lies_in = {place for place in Path(file).parents if place in _folders} if file else set()
    return bool(lies_in - {folder}) and ((folder / f"{name}.py").is_file() or (folder / name).is_dir())
