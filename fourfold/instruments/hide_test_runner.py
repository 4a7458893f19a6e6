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


class HiddenModules(MetaPathFinder, Loader):
    """The loaded modules of some packages, which `hide` removes from `sys.modules`.

    After `install`, importing a hidden module gives the same module, which is then visible until the next `hide`.

    Args:
        packages: the names of the packages.
    """

    def __init__(self, packages: Collection[str]) -> None:
        self.packages, self.modules = packages, dict[str, ModuleType]()
        self._visible = set[str]()

    def install(self) -> None:
        """Hide the modules that are loaded now, and find them when they are imported."""
        self._visible.update(name for name in sys.modules if name.partition(".")[0] in self.packages)
        self.hide()
        sys.meta_path.insert(0, self)

    def hide(self) -> None:
        """Hide the modules of the packages, among them those imported since the last call."""
        while self._visible:
            name = self._visible.pop()
            if name in sys.modules:
                self.modules[name] = sys.modules.pop(name)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a hidden module."""
        if name.partition(".")[0] in self.packages:
            self._visible.add(name)
        return ModuleSpec(name, self, is_package=True) if name in self.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module that `exec_module` replaces."""
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Put the hidden module in the place of a new one."""
        sys.modules[module.__name__] = self.modules[module.__name__]


@contextlib.contextmanager
def hide_modules(packages: Collection[str]) -> Iterator[None]:
    """Hide the loaded modules of some packages inside the block. Importing one still gives the same module."""
    finder = HiddenModules(packages)
    finder.install()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(finder.modules)


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
        with hide_modules(RUNNERS):
            yield
    finally:
        sys.argv = arguments
        if triton is not None:
            del triton.knobs.runtime.interpret
        os.environ.update(variables)
