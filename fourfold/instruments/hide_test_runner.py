"""Concealment of a test run from a program: loaded modules, environment variables and arguments."""

import contextlib
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from fourfold.compat.test_runners import RUNNERS

# Variables that are set in a test run.
VARIABLES = ("PYTEST_", "FOURFOLD_OPERATIONS", "HYPOTHESIS_")
# A kernel must be right with a compiler, too.
INTERPRETER = "TRITON_INTERPRET"


class _Hidden(MetaPathFinder, Loader):
    """An importer that gives hidden modules to code that imports them."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in self._modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = self._modules[module.__name__]


@contextlib.contextmanager
def hidden(packages: Collection[str]) -> Iterator[None]:
    """Hide the loaded modules of some packages inside the block. Importing one still gives the same module."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in packages}
    finder = _Hidden(modules)
    for name in modules:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(modules)


@contextlib.contextmanager
def out_of_sight(interpreter: bool = True) -> Iterator[None]:
    """Hide the modules, variables and arguments of a test runner inside the block.

    Importing a hidden module still gives the same module.

    Args:
        interpreter: whether to hide that Triton's kernels are interpreted, too.
    """
    triton = sys.modules.get("triton")
    if interpreter and triton is not None and triton.knobs.runtime.interpret:
        # Kernels decorated inside the block must still be interpreted. This sets the variable, too.
        triton.knobs.runtime.interpret = True
    else:
        triton = None
    prefixes = (*VARIABLES, INTERPRETER) if interpreter else VARIABLES
    variables = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    arguments = sys.argv
    for name in variables:
        del os.environ[name]
    sys.argv = [""]
    try:
        with hidden(RUNNERS):
            yield
    finally:
        sys.argv = arguments
        if triton is not None:
            del triton.knobs.runtime.interpret
        os.environ.update(variables)
