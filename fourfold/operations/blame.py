"""Blame: whose an exception of a call is.

Only what is raised on purpose is a refusal: by a ``raise`` or ``assert`` statement of the kernel's own code, or by the
argument checks of a library, a driver or a compiler. What Python raises of itself, as for an attribute that is missing,
is a bug. One exception: ``rows, cols = x.shape`` says how many axes a kernel takes, as the claim ``ranks`` does. What
the harness lacks or breaks says nothing of the kernel.

The innermost frame of a traceback tells which it is: its file, and the instruction that raised.
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
# In a wheel these lie within the package's folder.
OPERATIONS = tuple(PACKAGE / name for name in ("impls", "oracles", "properties"))
_STANDARD = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
# Folders that installed packages lie in.
_INSTALLED = {Path(sysconfig.get_path(name)).name for name in ("purelib", "platlib")} | {"dist-packages"}
# Triton's interpreter, which takes the place of its compiler here.
_INTERPRETER = "triton.runtime.interpreter"
# What no library raises to refuse an argument.
BUGS = (AttributeError, NameError, LookupError, ZeroDivisionError, RecursionError)
# What Python itself and its standard library raise where they are used wrongly.
_BUGS_OF_PYTHON = (*BUGS, TypeError, ValueError, StopIteration, OverflowError)
_UNPACKING = (dis.opmap["UNPACK_SEQUENCE"], dis.opmap["UNPACK_EX"])
# Of an exception, or of its class: whose it is.
_ATTRIBUTE = "fourfold_blame"


class Blame(Enum):
    """Whose an exception is."""

    REFUSAL = "refusal"  # the kernel, or a library in its place, says that it does not take the case
    BUG = "bug"  # the kernel's code is wrong
    LACK = "lack"  # the harness lacks something, such as inline assembly in the interpreter: a GPU may have it
    HARNESS = "harness"  # the harness is wrong
    DEFINITION = "definition"  # the definition that the kernel is compared with is wrong, or has no bound


class Lack(NotImplementedError):
    """The interpreter or the emulator lacks something that a GPU has."""


class Owner(Enum):
    """Whose a file is."""

    AUTHOR = "author"
    HARNESS = "harness"
    INSTALLED = "installed"
    STANDARD = "standard"


def owner_of(file: str) -> Owner:
    """Return whose a file is, by the folder it lies in. Code without a file, as of ``exec``, is the author's."""
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
    """Whose the code of a frame is. Cython names a file of the machine that it ran on; its module is here."""
    file = frame.f_code.co_filename
    if not file.startswith("<") and not Path(file).is_absolute():
        file = frame.f_globals.get("__file__") or file
    return owner_of(file)


def mark(error: BaseException, blame: Blame) -> None:
    """Set whose an exception is. The first mark stays."""
    if marked(error) is None:
        object.__setattr__(error, _ATTRIBUTE, blame)


def marked(error: BaseException) -> Blame | None:
    """Return whose an exception was marked to be; None without a mark."""
    found = getattr(error, _ATTRIBUTE, None)
    return found if isinstance(found, Blame) else None


def blame_of(error: BaseException) -> Blame:
    """Return whose an exception of a call is, by the place that raised it.

    An error that the interpreter or the compiler wraps counts in its place: a name that is not there is a bug in a
    kernel's own code, wherever that is run.
    """
    if type(error).__module__.startswith("triton.") and error.__cause__ is not None:
        wrapped = blame_of(error.__cause__)
        compiled = type(error).__name__ != "InterpreterError"
        return wrapped if not compiled or isinstance(error.__cause__, NameError) else Blame.REFUSAL
    if isinstance(error, Lack):
        return Blame.LACK
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
    return _without_statement(error, innermost, Owner.HARNESS if interpreter else owner)


def _without_statement(error: BaseException, entry: TracebackType, owner: Owner) -> Blame:
    """The blame for an exception that no statement raised: an instruction did, or a function that is not Python's."""
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
        return Blame.BUG  # arguments that are too few, too many, or have other names
    if owner is not Owner.AUTHOR:
        return Blame.REFUSAL
    # A function that takes no arguments cannot be given wrong ones: `tensor.numpy()` refuses the tensor.
    is_wrong_call = isinstance(error, TypeError) and call.arguments
    return Blame.REFUSAL if _is_installed(call.root) and not is_wrong_call else Blame.BUG


class _Call:
    """The call that an instruction makes, as far as it is known without running anything.

    Attributes:
        root: the value of the name that the function's expression begins with; None where it is no call.
        callee: the function; None where that is not known.
        arguments: whether it is given any.
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
        self.root = found = _value_of(inner.id, entry.tb_frame)
        for name in names if exact and found is not None else ():
            found = _attribute(found, name)
        self.callee = found if exact else None


def _entries(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _is_raise(entry: TracebackType) -> bool:
    """Whether a ``raise`` or an ``assert`` statement has raised."""
    return _instruction(entry) == dis.opmap["RAISE_VARARGS"]


def _instruction(entry: TracebackType) -> int | None:
    """Return the number of the instruction that raised; None where there is none."""
    instructions, at = entry.tb_frame.f_code.co_code, entry.tb_lasti
    return instructions[at] if 0 <= at < len(instructions) else None


def _expression_at(entry: TracebackType) -> ast.expr | None:
    """The expression that an instruction evaluates; None where the source is not to be had."""
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
    missing = object()
    for scope in (frame.f_locals, frame.f_globals, vars(builtins)):
        if (found := scope.get(name, missing)) is not missing:
            return found
    return None


def _attribute(owner: Any, name: str) -> Any:
    """An attribute, without running a property or ``__getattr__``; None where that is not possible."""
    if isinstance(owner, ModuleType | type):
        return vars(owner).get(name) if isinstance(owner, ModuleType) else getattr(owner, name, None)
    own = getattr(owner, "__dict__", {}).get(name)
    if own is not None:
        return own
    found = next((vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)), None)
    return None if isinstance(found, property) else found


def _code_of(callee: Any) -> CodeType | None:
    """The code that binds the arguments of a call; None where that is not Python's."""
    found = vars(callee).get("__init__") if isinstance(callee, type) else callee
    return getattr(found, "__code__", None)


def _is_installed(found: Any) -> bool:
    """Whether a module, a function, a class or an object's class belongs to an installed package."""
    if isinstance(found, BuiltinFunctionType) and not isinstance(found.__self__, ModuleType | None):
        found = found.__self__
    if isinstance(found, ModuleType):
        module: Any = found.__name__
    else:
        kind = found if isinstance(found, type | FunctionType | BuiltinFunctionType) else type(found)
        module = getattr(getattr(found, "__objclass__", kind), "__module__", None)
    package = sys.modules.get(module.partition(".")[0]) if isinstance(module, str) else None
    return owner_of(getattr(package, "__file__", None) or "") is Owner.INSTALLED


def _is_of_the_interpreter(found: Any) -> bool:
    kind = type(found)
    return any(each.__module__ == _INTERPRETER for each in kind.__mro__)


def statement(error: BaseException) -> str:
    """Return the source line that raised an exception; "" where there is none."""
    frames = traceback.extract_tb(error.__traceback__, -1) if error.__traceback__ else []
    return (frames[-1].line or "").strip() if frames else ""
