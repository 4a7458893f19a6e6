"""Interpret Triton kernels that were made for a GPU, in modules imported before the CPU was requested.

Triton decides when it decorates a function whether to compile or to interpret it. Its own functions, like tl.sum, are
decorated when it is imported.
"""

import gc
import os
import sys
import types
from collections.abc import Callable
from typing import Any

_VARIABLE = "TRITON_INTERPRET"


def is_interpreting() -> bool:
    """Return whether Triton interprets the kernels of this process."""
    return os.environ.get(_VARIABLE, "0").lower() in ("1", "true", "on", "yes", "y")


def interpret_kernels() -> None:
    """Run all Triton kernels of this process in the interpreter, with its corrections.

    Existing kernels are replaced wherever a module, a closure, an object or a list refers to them.

    Raises:
        RuntimeError: this release of Triton has changed a private part that is used here.
    """
    was_imported = "triton" in sys.modules
    asked_for = is_interpreting()
    os.environ[_VARIABLE] = "1"
    from fourfold.backends.triton.interpreter import corrections

    corrections.install()
    if was_imported and not asked_for:
        _replace_compiled()


def _replace_compiled() -> None:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted = {}
    for compiled in [each for each in gc.get_objects() if type(each) is JITFunction]:
        interpreted[compiled] = InterpretedFunction(compiled.fn)
        # Attributes that other code reads: libraries that generate code copy a kernel's source.
        attributes = {"__doc__": compiled.fn.__doc__, "__globals__": compiled.fn.__globals__, "src": compiled.src}
        interpreted[compiled].__dict__.update(attributes)
    _replace_everywhere(interpreted, _bind)


def compile_kernels() -> None:
    """Let Triton compile all kernels of this process, which interprets them: the reverse of `interpret_kernels`.

    The corrections of the interpreter stay. This is for a process that launches no kernel.
    """
    from triton import knobs
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    os.environ[_VARIABLE] = "0"
    knobs.runtime.interpret = False
    gc.unfreeze()  # frozen objects, such as those of collected tests, cannot be found
    functions = [each for each in gc.get_objects() if type(each) is InterpretedFunction]
    _replace_everywhere({each: JITFunction(each.fn, **each.kwargs) for each in functions}, lambda function: function)


def _replace_everywhere(replacements: dict[Any, Any], method: Callable[[Any], Any]) -> None:
    """Replace kernels wherever something refers to them. `method` makes a replacement a method of the language."""
    import triton.language as tl

    by_identity = {id(kernel): function for kernel, function in replacements.items()}
    # The compiler binds a function of the language to the block that it is called on, as in x.sum(). Python binds only
    # its own functions, so Triton uses a wrapper of it while it interprets.
    for name, member in list(vars(tl.tensor).items()):
        for within in (member, *(cell.cell_contents for cell in getattr(member, "__closure__", None) or ())):
            if id(within) in by_identity:
                setattr(tl.tensor, name, method(by_identity[id(within)]))
    for owner in gc.get_referrers(*replacements):  # once for all kernels: it looks at every object of the process
        if owner is not replacements:
            _replace(owner, by_identity)


def _bind(function: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


def _replace(owner: Any, interpreted: dict[int, Any]) -> None:
    """Replace kernels, given by their identities, in one object that refers to some."""
    if isinstance(owner, dict):
        owner.update({key: interpreted[id(value)] for key, value in owner.items() if id(value) in interpreted})
    elif isinstance(owner, list):
        owner[:] = [interpreted.get(id(value), value) for value in owner]
    elif isinstance(owner, types.CellType):
        owner.cell_contents = interpreted[id(owner.cell_contents)]
    else:
        # An object without a dictionary of its own refers to the values of its attributes itself.
        attributes = getattr(owner, "__dict__", {})
        for name in [name for name, value in attributes.items() if id(value) in interpreted]:
            object.__setattr__(owner, name, interpreted[id(attributes[name])])
