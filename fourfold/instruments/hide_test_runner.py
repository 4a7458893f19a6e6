"""What a program may see of a test: loaded modules, environment variables, arguments. It can be put out of sight."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from fourfold.compat.test_runners import RUNNERS

# Variables that are set where tests run.
VARIABLES = ("PYTEST_", "FOURFOLD_OPERATIONS", "HYPOTHESIS_")
# A kernel must be right with a compiler, too.
INTERPRETER = "TRITON_INTERPRET"


class _Hidden(MetaPathFinder, Loader):
    """Gives modules that are out of sight to whoever imports them."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in self._modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = self._modules[module.__name__]


@contextlib.contextmanager
def out_of_sight(interpreter: bool = True) -> Iterator[None]:
    """Within it, the modules and variables of a test runner, and its arguments, are not to be seen.

    Modules that are imported nevertheless are the same as before.

    Args:
        interpreter: whether it is not to be seen either that Triton's kernels are interpreted.
    """
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in RUNNERS}
    triton = sys.modules.get("triton")
    if interpreter and triton is not None and triton.knobs.runtime.interpret:
        # Kernels that are decorated meanwhile are interpreted nevertheless. This sets the variable, too.
        triton.knobs.runtime.interpret = True
    else:
        triton = None
    prefixes = (*VARIABLES, INTERPRETER) if interpreter else VARIABLES
    variables = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    finder, arguments = _Hidden(hidden), sys.argv
    for name in hidden:
        del sys.modules[name]
    for name in variables:
        del os.environ[name]
    sys.argv = [""]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.argv = arguments
        if triton is not None:
            del triton.knobs.runtime.interpret
        os.environ.update(variables)
        sys.modules.update(hidden)
