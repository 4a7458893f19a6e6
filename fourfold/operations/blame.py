"""Blame: the party responsible for an exception of a call.

Only an exception raised on purpose is a refusal: by a ``raise`` or ``assert`` statement in the kernel's own code, or by
the argument checks of a library, a driver or a compiler. An exception that Python raises itself, for a missing
attribute for example, is a bug, and so is a grid that no GPU takes. ``rows, cols = x.shape`` is the one exception: it
states the number of axes, as the claim ``ranks`` does. An error or a lack of the harness is no evidence about the
kernel.

The innermost frame of a traceback decides: its file, and the instruction that raised.
"""

import ast
import builtins
import dis
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from enum import Enum
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel these folders lie within the package's folder.
OPERATIONS = tuple(PACKAGE / name for name in ("impls", "oracles", "properties"))
_STANDARD = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
# The folders of installed packages.
_INSTALLED = {Path(sysconfig.get_path(name)).name for name in ("purelib", "platlib")} | {"dist-packages"}
# Triton's interpreter, which replaces its compiler here.
_INTERPRETER = "triton.runtime.interpreter"
# Exceptions by which no library refuses an argument.
BUGS = (AttributeError, NameError, LookupError, ZeroDivisionError, RecursionError)
# Exceptions that Python itself and its standard library raise for wrong use.
_BUGS_OF_PYTHON = (*BUGS, TypeError, ValueError, StopIteration, OverflowError)
_UNPACKING = (dis.opmap["UNPACK_SEQUENCE"], dis.opmap["UNPACK_EX"])
# The attribute of an exception, or of its class, that holds its blame.
_ATTRIBUTE = "fourfold_blame"


class Blame(Enum):
    """The party responsible for an exception."""

    REFUSAL = "refusal"  # the kernel, or a library on its behalf, rejects the case
    BUG = "bug"  # the kernel's code is wrong
    LACK = "lack"  # the harness lacks a feature that a GPU may have, a clock in the interpreter for example
    HARNESS = "harness"  # the harness is wrong
    DEFINITION = "definition"  # the kernel's definition is wrong, or has no error bound


class Lack(NotImplementedError):
    """An error for a feature of a GPU that the interpreter or the emulator lacks."""


class ImpossibleGrid(ValueError):
    """An error for a grid past the limits of every GPU: a bug, unless the kernel checks the sizes and raises itself."""


class Owner(Enum):
    """The owner of a file."""

    AUTHOR = "author"
    HARNESS = "harness"
    INSTALLED = "installed"
    STANDARD = "standard"


def owner_of(file: str) -> Owner:
    """Return the owner of a file, by its folder. Code without a file, from ``exec`` for example, is the author's."""
    folders = Path(file).parents
    if any(folder in folders for folder in OPERATIONS):
        return Owner.AUTHOR
    if PACKAGE in folders:
        return Owner.HARNESS
    if any(folder.name in _INSTALLED for folder in folders):
        return Owner.INSTALLED
    is_standard = file.startswith("<frozen ") or any(folder in folders for folder in _STANDARD)
    return Owner.STANDARD if is_standard else Owner.AUTHOR


def _owner_of_frame(frame: FrameType) -> Owner:
    """Return the owner of a frame's code. Cython code names a file on its build machine, so use its module's file."""
    file = frame.f_code.co_filename
    if not file.startswith("<") and not Path(file).is_absolute():
        file = frame.f_globals.get("__file__") or file
    return owner_of(file)


def mark(error: BaseException, blame: Blame) -> None:
    """Set the blame of an exception, unless it is already set."""
    if recorded_blame(error) is None:
        object.__setattr__(error, _ATTRIBUTE, blame)


def recorded_blame(error: BaseException) -> Blame | None:
    """Return the blame that was set on an exception; None if there is none."""
    blame = getattr(error, _ATTRIBUTE, None)
    return blame if isinstance(blame, Blame) else None


def blame_of(error: BaseException) -> Blame:
    """Return the blame of an exception of a call, by the place that raised it.

    An error that the interpreter or the compiler wraps counts in place of the wrapper. An undefined name is a bug in
    the kernel's own code in both.
    """
    if type(error).__module__.startswith("triton.") and error.__cause__ is not None:
        wrapped = blame_of(error.__cause__)
        compiled = type(error).__name__ != "InterpreterError"
        return wrapped if not compiled or isinstance(error.__cause__, NameError) else Blame.REFUSAL
    if isinstance(error, Lack):
        return Blame.LACK
    if isinstance(error, ImpossibleGrid):
        return Blame.BUG
    if isinstance(error, ImportError):
        return Blame.REFUSAL  # a library is missing on this machine
    if error.__traceback__ is None:
        return Blame.BUG if isinstance(error, BUGS) else Blame.REFUSAL
    *_, innermost = _entries(error.__traceback__)
    owner = _owner_of_frame(innermost.tb_frame)
    interpreter = innermost.tb_frame.f_globals.get("__name__") == _INTERPRETER
    if _is_raise(innermost):
        if owner is Owner.AUTHOR:
            return Blame.REFUSAL
        if interpreter and isinstance(error, NotImplementedError):
            return Blame.LACK
        return Blame.BUG if isinstance(error, _BUGS_OF_PYTHON if owner is Owner.STANDARD else BUGS) else Blame.REFUSAL
    if isinstance(error, AttributeError) and _is_of_the_interpreter(error.obj):
        return Blame.LACK
    if owner is Owner.STANDARD:
        return Blame.BUG if isinstance(error, _BUGS_OF_PYTHON) else Blame.REFUSAL
    return _blame_instruction(error, innermost, Owner.HARNESS if interpreter else owner)


def _blame_instruction(error: BaseException, entry: TracebackType, owner: Owner) -> Blame:
    """Return the blame of an exception raised by an instruction or a compiled function, not by a statement."""
    if owner is Owner.AUTHOR and isinstance(error, ValueError) and _instruction(entry) in _UNPACKING:
        return Blame.REFUSAL
    call = _Call(entry)
    pythons = _code_of(call.callee)
    if owner is Owner.HARNESS and not _is_installed(call.callee):
        of_the_author = pythons is not None and owner_of(pythons.co_filename) is not Owner.HARNESS
        return Blame.BUG if of_the_author else Blame.HARNESS
    if isinstance(error, BUGS):
        return Blame.BUG
    if isinstance(error, RuntimeError):
        return Blame.REFUSAL  # no operator of Python raises it
    if isinstance(error, TypeError) and pythons is not None:
        return Blame.BUG  # wrong number or names of arguments
    if owner is not Owner.AUTHOR:
        return Blame.REFUSAL
    # A function that takes no arguments cannot be given wrong ones: `tensor.numpy()` refuses the tensor.
    is_wrong_call = isinstance(error, TypeError) and call.arguments
    return Blame.REFUSAL if _is_installed(call.root) and not is_wrong_call else Blame.BUG


class _Call:
    """The call that an instruction makes, as far as it can be found without running anything.

    Attributes:
        root: the value of the first name in the function's expression; None if the instruction is no call.
        callee: the function; None if it is unknown.
        arguments: whether the call has arguments.
    """

    def __init__(self, entry: TracebackType) -> None:
        self.root: Any = None
        self.callee: Any = None
        self.arguments = False
        node = _expression_at(entry)
        if not isinstance(node, ast.Call):
            return
        self.arguments = bool(node.args or node.keywords)
        names: list[str] = []
        inner, exact = node.func, True
        while not isinstance(inner, ast.Name):
            if isinstance(inner, ast.Attribute):
                names.insert(0, inner.attr)
                inner = inner.value
            elif isinstance(inner, ast.Call | ast.Subscript):
                names, exact = [], False
                inner = inner.func if isinstance(inner, ast.Call) else inner.value
            else:
                return
        self.root = value = _value_of(inner.id, entry.tb_frame)
        for name in names if exact and value is not None else ():
            value = _attribute(value, name)
        self.callee = value if exact else None


def _entries(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _is_raise(entry: TracebackType) -> bool:
    """Return whether a ``raise`` or an ``assert`` statement raised the exception."""
    return _instruction(entry) == dis.opmap["RAISE_VARARGS"]


def _instruction(entry: TracebackType) -> int | None:
    """Return the number of the instruction that raised; None where there is none."""
    instructions, index = entry.tb_frame.f_code.co_code, entry.tb_lasti
    return instructions[index] if 0 <= index < len(instructions) else None


def _expression_at(entry: TracebackType) -> ast.expr | None:
    """Return the expression that an instruction evaluates; None if the source is not available."""
    code = entry.tb_frame.f_code
    if entry.tb_lasti < 0:
        return None
    first, last, start, end = next(islice(code.co_positions(), entry.tb_lasti // 2, None), (None,) * 4)
    if first is None or last is None or start is None or end is None:
        return None
    lines = [line.encode() for line in linecache.getlines(code.co_filename, entry.tb_frame.f_globals)[first - 1 : last]]
    if not lines:
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _value_of(name: str, frame: FrameType) -> Any:
    absent = object()
    for scope in (frame.f_locals, frame.f_globals, vars(builtins)):
        if (value := scope.get(name, absent)) is not absent:
            return value
    return None


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute without running a property or ``__getattr__``; None if that is impossible."""
    if isinstance(owner, ModuleType | type):
        return vars(owner).get(name) if isinstance(owner, ModuleType) else getattr(owner, name, None)
    value = getattr(owner, "__dict__", {}).get(name)
    if value is not None:
        return value
    attribute = next((vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)), None)
    return None if isinstance(attribute, property) else attribute


def _code_of(callee: Any) -> CodeType | None:
    """Return the Python code that binds the arguments of a call; None if it is not Python code."""
    function = vars(callee).get("__init__") if isinstance(callee, type) else callee
    return getattr(function, "__code__", None)


def _is_installed(value: Any) -> bool:
    """Return whether a module, a function, a class or an object's class belongs to an installed package."""
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType | None):
        value = value.__self__
    if isinstance(value, ModuleType):
        module: Any = value.__name__
    else:
        kind = value if isinstance(value, type | FunctionType | BuiltinFunctionType) else type(value)
        module = getattr(getattr(value, "__objclass__", kind), "__module__", None)
    package = sys.modules.get(module.partition(".")[0]) if isinstance(module, str) else None
    return owner_of(getattr(package, "__file__", None) or "") is Owner.INSTALLED


def _is_of_the_interpreter(value: Any) -> bool:
    kind = type(value)
    return any(base.__module__ == _INTERPRETER for base in kind.__mro__)


def statement(error: BaseException) -> str:
    """Return the source line that raised an exception; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__, -1) if error.__traceback__ else []
    return (frames[-1].line or "").strip() if frames else ""
